"""A random model of two language pairs, and its tokenizer."""

import torch
from transformers import MarianConfig, MarianMTModel

from hf_deepwide.data.arguments import DataArguments
from hf_deepwide.data.languages import add_tags, translation_pairs
from hf_deepwide.data.tokenizer import TokenizerArguments, train_tokenizer
from hf_deepwide.evaluation.arguments import EvaluationArguments
from hf_deepwide.families import FAMILIES

TEXTS = ["two dogs run", "a man in a red coat sits by the water", "who is there"]
CORPUS = [*TEXTS, "the dogs sit in the red water", "a tree by the coat", "a man runs there", "who sits"] * 3
PAIRS = ["en-de", "en-fr"]
LENGTH = 7
SIZES = {
    "d_model": 16,
    "encoder_layers": 1,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
    "max_position_embeddings": 48,
    "init_std": 0.6,  # large weights, so that every tag leads to its own translation
}
SEARCH = EvaluationArguments(num_beams=2, max_length_factor=0, max_length_offset=LENGTH)


def build(family: str, side: str, posteriors: str = "none"):
    """A random model of the pairs `PAIRS`, and its tokenizer."""
    args = DataArguments(pairs=PAIRS, language_tag=side, posteriors=posteriors)
    tokenizer = train_tokenizer(CORPUS, TokenizerArguments(vocab_size=80))
    add_tags(tokenizer, args)
    ids = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("pad", "bos", "eos")}
    fields = {**SIZES, **ids, "vocab_size": len(tokenizer), "decoder_start_token_id": tokenizer.eos_token_id}
    torch.manual_seed(1)
    if family == "marian":
        model = MarianMTModel(MarianConfig(**fields, forced_eos_token_id=None, scale_embedding=True))
    else:
        if posteriors != "none":
            fields |= {"num_posteriors": 2, "posterior_names": args.posterior_names, "latent_encoder": False}
        elif family == "latent_depth":
            fields["layer_selection_init"] = 1.0
        model = FAMILIES[family].lm(FAMILIES[family].config(**fields))
    model.config.translation_pairs = translation_pairs(args, tokenizer)
    model.generation_config.min_new_tokens = LENGTH
    return model.eval(), tokenizer
