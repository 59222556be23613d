"""Tokenizers with language codes of their own (NLLB, mBART, M2M100), and what their models need."""

import json

import sentencepiece
from transformers import (
    M2M100Config,
    M2M100ForConditionalGeneration,
    M2M100Tokenizer,
    MBart50Tokenizer,
    MBartConfig,
    MBartForConditionalGeneration,
    MBartTokenizer,
    NllbTokenizer,
)

SIZES = {
    "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "max_position_embeddings": 64,
    "encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0,
}  # fmt: skip
SPECIAL = ["<s>", "<pad>", "</s>", "<unk>"]
SCORED = [(token, 0.0) for token in SPECIAL] + [("▁", -2.0), *((f"▁{letter}", -1.0) for letter in "abcd")]


def nllb(folder):
    return NllbTokenizer(
        vocab={token: i for i, token in enumerate([*SPECIAL, "▁", "a", "b", "c", "d"])},
        merges=[],
        extra_special_tokens=["eng_Latn", "deu_Latn"],
    )


def m2m(folder):
    (folder / "text").write_text("a b c d a b c d")
    sentencepiece.SentencePieceTrainer.train(
        input=str(folder / "text"), model_prefix=str(folder / "m"), vocab_size=8, minloglevel=2
    )
    pieces = sentencepiece.SentencePieceProcessor(str(folder / "m.model"))
    words = [*SPECIAL, *(pieces.id_to_piece(i) for i in range(3, len(pieces)))]
    (folder / "vocab.json").write_text(json.dumps({word: i for i, word in enumerate(words)}))
    return M2M100Tokenizer(f"{folder}/vocab.json", f"{folder}/m.model")


# name: (tokenizer, model, config, source and target code, whether targets begin with their code)
KINDS = {
    "nllb": (nllb, M2M100ForConditionalGeneration, M2M100Config, "deu_Latn", "eng_Latn", True),
    "m2m100": (m2m, M2M100ForConditionalGeneration, M2M100Config, "de", "fr", True),
    "mbart50": (
        lambda folder: MBart50Tokenizer(vocab=SCORED[3:4] + SCORED[:1] + SCORED[2:3] + SCORED[4:]),
        MBartForConditionalGeneration, MBartConfig, "de_DE", "fr_XX", True,
    ),
    "mbart": (
        lambda folder: MBartTokenizer(vocab=SCORED),
        MBartForConditionalGeneration, MBartConfig, "de_DE", "fr_XX", False,
    ),
}  # fmt: skip


def token_id(tokenizer, code):
    return getattr(tokenizer, "lang_code_to_id", {}).get(code, tokenizer.convert_tokens_to_ids(code))
