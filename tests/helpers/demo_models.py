"""Folders of random models that the demo can show."""

import torch

from hf_deepwide.data.tokenizer import TokenizerArguments, train_tokenizer
from hf_deepwide.families import FAMILIES

TEXTS = ["two dogs run", "a man in a red coat", "who is there"]
SIZES = {
    "d_model": 16,
    "encoder_layers": 1,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
    "max_position_embeddings": 48,
    "init_std": 0.6,  # large weights, so that every source has its own translation
}


def build(family, **fields):
    """A random model in evaluation mode, and its tokenizer."""
    tokenizer = train_tokenizer(TEXTS * 5, TokenizerArguments(vocab_size=80))
    ids = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("pad", "bos", "eos")}
    fields = {**SIZES, **ids, "decoder_start_token_id": tokenizer.eos_token_id, "vocab_size": len(tokenizer), **fields}
    torch.manual_seed(0)
    return FAMILIES[family].lm(FAMILIES[family].config(**fields)).eval(), tokenizer


def save(folder, family, **fields):
    """Save the model and the tokenizer of `build` to a folder, and return the folder."""
    model, tokenizer = build(family, **fields)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
