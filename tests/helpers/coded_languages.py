"""Tokenizers with built-in language codes (NLLB, mBART, M2M100), their models, and recipes for fine-tuning."""

import json

import torch
from sentence_pieces import train_pieces, write_vocabulary
from tiny_run import tiny_values
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

from hf_deepwide.models.language_pairs import language_ids
from hf_deepwide.runs.recipe import check_recipe

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
    model, words = train_pieces(folder, ["a b c d a b c d"], 8)
    return M2M100Tokenizer(write_vocabulary(folder / "vocab.json", [*SPECIAL, *words]), model)


# name: (tokenizer, model, config, source code, target code, whether a target begins with its language code)
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


def make_base(kind, folder, spare=0, **fields):
    """Save a random model and its tokenizer to a folder, and return both. `spare`: embedding rows without a token."""
    folder.mkdir(exist_ok=True)
    tokenizer = KINDS[kind][0](folder)
    size = max([*tokenizer.get_vocab().values(), *language_ids(tokenizer).values()]) + 1 + spare
    model_class, config_class = KINDS[kind][1:3]
    ids = {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 2}
    torch.manual_seed(1)
    model = model_class(config_class(vocab_size=size, **ids, **SIZES, **fields)).eval()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model, tokenizer


def write_corpus(folder):
    rows = [{"x": text, "y": text[::-1]} for text in ("a b c", "d c", "a a b", "c b a d") * 4]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def recipe_of(folder, family="mat", tokenizer=None, **data):
    """A recipe that fine-tunes the model in `folder/base` for two steps."""
    base = str(folder / "base")
    values = tiny_values(folder / "run", max_steps=2, warmup_steps=1, eval_steps=2, save_steps=2, max_tokens=64)
    values["model"] = {"family": family, "init_from": base}
    values["tokenizer"] = {"path": base, **(tokenizer or {})}
    values["data"] = {
        "format": "jsonl", "root": str(folder), **dict.fromkeys(("train", "validation", "test"), "rows.jsonl"),
        "source_field": "x", "target_field": "y", "max_length": 16, **data,
    }  # fmt: skip
    return check_recipe(values, "codes", "codes.yaml")
