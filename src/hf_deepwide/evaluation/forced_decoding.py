"""Forced decoding: the log-probabilities of given translations, for reranking and for noisy channels."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..errors import UserError
from ..models.language_pairs import Languages, speaking
from ..models.plain_text import TextEncoder, encode_sources, positions, source_limit
from ..progress import shows_bars
from .arguments import EvaluationArguments
from .fitting_batches import in_fitting_batches
from .metrics import check_parallel
from .translate import autocast, evaluating, padded


class TargetScore(NamedTuple):
    """The natural log-probability of a translation, and its length as beam search counts it.

    `tokens` includes `</s>` and the forced language code at the beginning. The probability of this code counts as 1.
    """

    log_probability: float
    tokens: int


@torch.no_grad()
def score_targets(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    sources: Sequence[str],
    targets: Sequence[str],
    args: EvaluationArguments,
    source_lang: str | None = None,
    target_lang: str | None = None,
) -> list[TargetScore]:
    """Score `targets[i]` as a translation of `sources[i]`.

    Beam search ranks translations by this log-probability, divided by tokens**length_penalty.

    Args:
        model: any encoder-decoder model.
        tokenizer: the model's tokenizer.
        sources, targets: sentences, as many sources as targets.
        args: only `max_tokens` of a batch and `precision` are used.
        source_lang, target_lang: the language pair, as for `translate`.

    Raises:
        UserError: there are no sentences; the numbers of sources and targets differ; a sentence is longer than the
            model allows; or the model does not support the language pair.
    """
    check_parallel(targets, sources, ("targets", "sources"))
    try:
        languages = Languages(model.config, model.generation_config, tokenizer)
        choice = languages.decide(source_lang, target_lang)
    except ValueError as error:
        raise UserError(str(error)) from None
    limit, most = source_limit(model.config, tokenizer), positions(model.config) or math.inf
    encoded = encode_sources(languages, choice, sources, limit)
    with speaking(tokenizer, choice.source_lang, choice.target_lang):
        encoder = TextEncoder(tokenizer, target=True, never=languages.control_ids)
        code = choice.settings.get("forced_bos_token_id")
        labels = [_as_generated(ids, tokenizer.eos_token_id, code) for ids in encoder(targets)]
    for number, (source, ids) in enumerate(zip(encoded, labels, strict=True), start=1):
        for side, length, longest in (("source", source.length, limit), ("target", len(ids), most)):
            if length > longest:
                raise UserError(f"line {number}: the {side} has {length} tokens, and the model takes {longest}")
    settings = {**model.generation_config.to_dict(), **choice.settings}
    start, forced = settings.get("decoder_start_token_id"), settings.get("forced_bos_token_id")
    start = model.config.decoder_start_token_id if start is None else start
    scores = [TargetScore(0.0, 0)] * len(labels)
    lengths = [max(len(source.ids), len(ids)) for source, ids in zip(encoded, labels, strict=True)]

    def token_losses(batch: list[int]) -> torch.Tensor:  # [batch, target]
        target = padded([labels[i] for i in batch], tokenizer.pad_token_id)  # [batch, target]
        inputs = {
            "input_ids": padded([encoded[i].ids for i in batch], tokenizer.pad_token_id),
            "attention_mask": padded([[1] * len(encoded[i].ids) for i in batch], 0),
            "decoder_input_ids": torch.cat([torch.full((len(batch), 1), start), target[:, :-1]], dim=1),
        }
        if choice.posterior is not None:
            inputs["posteriors"] = torch.full((len(batch),), choice.posterior)
        inputs = {name: tensor.to(model.device) for name, tensor in inputs.items()}
        logits = model(**inputs, use_cache=False).logits.float()  # [batch, target, V]
        target = target.to(logits.device)
        return torch.nn.functional.cross_entropy(logits.transpose(1, 2), target, reduction="none").double()

    with (
        evaluating(model),
        autocast(model.device, args.precision),
        tqdm(total=len(labels), desc="scoring", unit="pair", leave=False, disable=not shows_bars()) as progress,
    ):
        for batch, losses in in_fitting_batches(token_losses, lengths, args):
            for row, i in enumerate(batch):
                first = int(labels[i][0] == forced)
                scores[i] = TargetScore(-losses[row, first : len(labels[i])].sum().item(), len(labels[i]))
            progress.update(len(batch))
    return scores


def _as_generated(ids: list[int], end: int, code: int | None) -> list[int]:
    """Return a target as the model generates it: a forced language code first, and nothing after the end token.

    The tokenizers of mBART and of NLLB in its legacy form put the code behind the end token.
    """
    ids = ids[: ids.index(end) + 1] if end in ids else ids
    return ids if code is None or ids[:1] == [code] else [code, *ids]
