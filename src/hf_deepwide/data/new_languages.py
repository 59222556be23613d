"""New languages for a model whose tokenizer has language codes (NLLB, M2M100).

A code is a special token. Its initial embedding is the embedding of a related language, or the mean over all codes.
Fine-tuning then teaches the language.
"""

import re
from collections.abc import Mapping

import torch
from tokenizers import AddedToken
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..errors import UserError, quote
from ..models.language_names import nearest
from ..models.language_pairs import language_ids

WHERE = "tokenizer.new_languages"
CODE = r"[A-Za-z]\w*"  # a language code


def add_languages(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, languages: Mapping[str, str | None]
) -> None:
    """Add language codes to a tokenizer and their embeddings to its model; both are changed in place.

    Tied matrices stay tied.

    Args:
        model: the model.
        tokenizer: the model's tokenizer, of NLLB or M2M100.
        languages: each new code, with the code of a related language, whose embedding is its initial embedding. None:
            the mean of all codes.

    Raises:
        UserError: see `add_codes`.
    """
    add_codes(tokenizer, languages)
    start_embeddings(model, tokenizer, languages)


def add_codes(tokenizer: PreTrainedTokenizerBase, languages: Mapping[str, str | None]) -> None:
    """Add language codes to a tokenizer as special tokens, which are saved with the tokenizer.

    Raises:
        UserError: the tokenizer has no codes or accepts no new code, it already has one of the new codes, or it lacks
            a related code.
    """
    if not isinstance(languages, Mapping) or not languages:
        raise UserError(f"{WHERE}: {quote(languages)} is not accepted; accepted: {{new code: related code, or None}}")
    for code in (*languages, *(related for related in languages.values() if related is not None)):
        if not isinstance(code, str) or not re.fullmatch(CODE, code):
            raise UserError(f"{WHERE}: {quote(code)} is no code of a language; accepted: letters, digits and _")
    codes, kind = language_ids(tokenizer), type(tokenizer).__name__
    has_table = hasattr(tokenizer, "lang_code_to_id")
    if not codes or (has_table and not hasattr(tokenizer, "lang_code_to_token")):
        raise UserError(f"{WHERE}: the {kind} takes no further codes; accepted: the tokenizers of NLLB and M2M100")
    tokens = {code: f"__{code}__" if has_table else code for code in languages}
    for code, related in languages.items():
        if code in codes or tokens[code] in tokenizer.get_vocab():
            known = "knows this code" if code in codes else "has a piece of this name"
            raise UserError(f"{WHERE}: {quote(code)}: the tokenizer {known} already; leave the code out")
        if related is not None and related not in codes:
            near = nearest(related, codes)
            meant = f"did you mean {' or '.join(near)}?" if near else f"it knows {len(codes)} codes"
            raise UserError(f"{WHERE}: {quote(code)}: the tokenizer does not know {quote(related)}; {meant}")
    for name in tokens.values():
        token = AddedToken(name, normalized=False, special=True)
        if has_table:  # M2M100's own codes have ids after its vocabulary, and the tokenizer does not count these ids
            last = max([*language_ids(tokenizer).values(), *tokenizer.get_vocab().values()])
            tokenizer.added_tokens_decoder = {last + 1: token}
        tokenizer.add_special_tokens({"extra_special_tokens": [token]}, replace_extra_special_tokens=False)


@torch.no_grad()
def start_embeddings(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, languages: Mapping[str, str | None]
) -> None:
    """Set the embedding of each new code in the encoder, the decoder and the output projection.

    Args:
        model: the model; its embeddings are enlarged if they have too few rows.
        tokenizer: the tokenizer, which already has the codes.
        languages: as for `add_languages`.
    """
    ids = language_ids(tokenizer)
    size = max(ids[code] for code in languages) + 1
    if size > model.config.vocab_size:
        model.resize_token_embeddings(size, mean_resizing=False)
    known = [token_id for code, token_id in ids.items() if code not in languages]
    head = model.get_output_embeddings()
    embeddings = [model.get_encoder().get_input_embeddings(), model.get_decoder().get_input_embeddings(), head]
    tables = {id(module.weight): module.weight for module in embeddings}  # tied matrices occur once
    if getattr(head, "bias", None) is not None:
        tables[id(head.bias)] = head.bias
    for code, related in languages.items():
        rows = known if related is None else [ids[related]]
        for table in tables.values():
            table[ids[code]] = table[rows].mean(0)
