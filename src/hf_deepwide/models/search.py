"""The loops of `generate` on a CPU: greedy search, sampling and beam search with a `DecodingCache`.

They find the same tokens as Transformers' loops. Only among equally good tokens, which are frequent in 16 bits, may
they find another one. With a small model, Transformers' loops take much of the time. They record each step, even if
the record is not requested. They also continue with all sentences until the last one has ended. Here a sentence leaves
the batch when its translation can no longer change. In sampling all rows stay, so that each row gets the same random
numbers as in Transformers. A call that requests more than tokens uses Transformers' loops: see `can_search`.

Shapes: R rows, L sentences that are left in the batch, K beams, V vocabulary, T the most tokens of a translation.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.generation import logits_process
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria

from .decoding import DecodingCache, is_as_made

# Processors that compute a row's scores from this row alone. With any other processor, no row leaves the batch.
ROW_BY_ROW: tuple[type, ...] = (
    logits_process.ForcedBOSTokenLogitsProcessor,
    logits_process.ForcedEOSTokenLogitsProcessor,
    logits_process.MinLengthLogitsProcessor,
    logits_process.MinNewTokensLengthLogitsProcessor,
    logits_process.NoBadWordsLogitsProcessor,
    logits_process.NoRepeatNGramLogitsProcessor,
    logits_process.RepetitionPenaltyLogitsProcessor,
    logits_process.SuppressTokensLogitsProcessor,
    logits_process.TemperatureLogitsWarper,
    logits_process.TopKLogitsWarper,
    logits_process.TopPLogitsWarper,
)
# Processors that leave few tokens to choose from. Beams that Transformers calls impossible can then be returned.
FEW_LEFT: tuple[type, ...] = (
    logits_process.ForcedBOSTokenLogitsProcessor,
    logits_process.ForcedEOSTokenLogitsProcessor,
    logits_process.PrefixConstrainedLogitsProcessor,
)
# Transformers gives impossible beams the negative of this score. Scores of translations must stay far from it.
IMPOSSIBLE = 1e9
CPU = torch.device("cpu")  # the device of all tensors here, whatever PyTorch's default device is
GROUP = 64  # scores in a group; `best` compares the best score of each group first


def can_search(
    generation_config: GenerationConfig,
    stopping_criteria: StoppingCriteriaList,
    past_key_values: Any = None,
    logits_processor: Sequence[Any] = (),
    synced_gpus: bool = False,
    streamer: Any = None,
    **unused: Any,
) -> bool:
    """Return whether these loops can do all that a call of `generate` requests.

    Args:
        generation_config: settings of the search.
        stopping_criteria: criteria that end a row; these loops support only the usual ones.
        past_key_values: the cache; these loops need a `DecodingCache` on the CPU.
        logits_processor: processors that change scores.
        synced_gpus: whether processes wait for each other.
        streamer: an object that receives each token at once.
        unused: other arguments that `generate` passes to its loops.
    """
    config = generation_config
    ends, longest = config._eos_token_tensor, config.max_length
    usual = all(
        criterion.max_length == longest
        if type(criterion) is MaxLengthCriteria
        else type(criterion) is EosTokenCriteria and ends is not None and torch.equal(criterion.eos_token_id, ends)
        for criterion in stopping_criteria
    )
    if config.num_beams > 1:
        returns_few = config.num_return_sequences == 1 and (ends is None or len(ends) == 1)
        if not returns_few and any(isinstance(processor, FEW_LEFT) for processor in logits_processor):
            return False
        if config.length_penalty < 0 and longest**-config.length_penalty > math.sqrt(IMPOSSIBLE):
            return False
    return (
        isinstance(past_key_values, DecodingCache)
        and past_key_values.memory.device.type == "cpu"
        and usual
        and len(stopping_criteria) == (1 if ends is None else 2)
        and not (synced_gpus or streamer is not None or config.return_dict_in_generate or config.low_memory)
        and not (config.do_sample and config.num_beams > 1)
    )


def longest(model: nn.Module, config: GenerationConfig, begun: int) -> int:
    """Return the most tokens of a row: `max_length`, or the number of the model's positions plus 1 if it is smaller.

    The last token is never read, so it needs no position. If `max_length` is larger than this, or the `begun` tokens
    are already too many, the search ends with an error, which the model raises in the next step.
    """
    return max(begun + 1, min(config.max_length, model.config.max_position_embeddings + 1))


def reader(model: nn.Module, cache: DecodingCache) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return the function that computes logits of tokens: the cache's, or the model if hooks or autocast wrap it."""
    if is_as_made(model):
        return cache.logits
    return lambda tokens: model(decoder_input_ids=tokens, cache=cache).logits


def may_leave(cache: DecodingCache, processors: LogitsProcessorList) -> bool:
    """Return whether sentences may leave the batch one by one."""
    return cache.sentences > 1 and all(type(processor) in ROW_BY_ROW for processor in processors)


def search_rows(
    model: nn.Module,
    input_ids: torch.Tensor,
    past_key_values: DecodingCache,
    logits_processor: LogitsProcessorList,
    generation_config: GenerationConfig,
    **unused: Any,
) -> torch.Tensor:
    """Run greedy search or sampling: add a token to each row, until all rows have ended.

    Args:
        model: a translation model.
        input_ids: the first tokens of each row, `[R, T']`.
        past_key_values: the cache, prepared for these rows.
        logits_processor: processors that change the scores of tokens.
        generation_config: settings of the search.
        unused: other arguments that `generate` passes to its loops.

    Returns:
        Tokens `[R, T]`, padded after their end tokens.
    """
    cache, processors, config = past_key_values, logits_processor, generation_config
    length, ends = input_ids.shape[1], config._eos_token_tensor
    read = reader(model, cache)
    leaves = ends is not None and not config.do_sample and may_leave(cache, processors)  # a draw is for all rows
    fill = 0 if ends is None else int(config._pad_token_tensor)
    sequences = input_ids.new_full((len(input_ids), longest(model, config, length)), fill, dtype=torch.long)
    sequences[:, :length] = input_ids
    rows: Any = slice(None)  # of `sequences` that are left
    has_ended = input_ids.new_zeros(len(input_ids), dtype=torch.bool)
    tokens = input_ids
    while True:
        scores = read(tokens)[:, -1].float()
        if processors:  # processors may change the scores in place
            scores = processors(sequences[rows, :length].contiguous(), scores.clone()).float()
        if config.do_sample:
            tokens = torch.multinomial(scores.softmax(-1), num_samples=1)[:, 0]
        else:
            tokens = torch.from_numpy(scores.numpy().argmax(-1))  # takes a tenth of the time that PyTorch needs
        if ends is not None:
            tokens = tokens.masked_fill(has_ended, fill)
            has_ended |= torch.isin(tokens, ends)
        sequences[rows, length] = tokens
        length += 1
        if length == config.max_length or has_ended.all():
            return sequences[:, :length]
        if leaves and (kept := cache.leave_out(has_ended)) is not None:
            rows = torch.arange(len(sequences), device=CPU)[rows][kept]
            tokens, has_ended = tokens[kept], has_ended[kept]
        tokens = tokens[:, None]


class BeamSearch:
    """Beam search of one call of `generate`. Its state holds only the sentences that are left in the batch."""

    def __init__(
        self,
        model: nn.Module,
        input_ids: torch.Tensor,
        past_key_values: DecodingCache,
        logits_processor: LogitsProcessorList,
        generation_config: GenerationConfig,
        **unused: Any,
    ) -> None:
        """Prepare the search.

        Args:
            model: a translation model. Its own methods decide when a sentence has ended.
            input_ids: the first tokens of each row, `[L * K, T']`.
            past_key_values: the cache, prepared for these rows.
            logits_processor: processors that change the log-probabilities of tokens.
            generation_config: the number of beams, and the rules by which a sentence has ended.
            unused: other arguments that `generate` passes to its loops.
        """
        config = generation_config
        self.model, self.cache, self.processors, self.config = model, past_key_values, logits_processor, config
        self.beams, self.begin = config.num_beams, input_ids.shape[1]
        self.length = self.begin
        ends, padding = config._eos_token_tensor, config._pad_token_tensor
        self.ends = input_ids.new_empty(0) if ends is None else ends
        self.candidates = max(2, 1 + len(self.ends)) * self.beams  # K of them continue, even if all others end
        self.read, self.leaves = reader(model, past_key_values), may_leave(past_key_values, logits_processor)
        sentences = len(input_ids) // self.beams
        # as in Transformers, which treats a padding token of 0 as missing and uses the end token instead
        fill = -1 if ends is None else int(padding or ends[0])
        shape = (len(input_ids), longest(model, config, self.begin))
        self.running = input_ids.new_full(shape, fill, dtype=torch.long)  # [L * K, T]
        self.running[:, : self.begin] = input_ids
        # [L, K]; at first all beams of a sentence are the same, so only one may be chosen
        self.scores = torch.zeros(sentences, self.beams, dtype=torch.float, device=CPU)
        self.scores[:, 1:] = -IMPOSSIBLE
        self.finished = self.running.view(sentences, self.beams, -1).clone()  # [L, K, T], the best first
        self.finished_scores = torch.full_like(self.scores, -IMPOSSIBLE)
        self.finished_lengths = input_ids.new_zeros(sentences, self.beams, 1)
        self.is_finished = torch.zeros(sentences, self.beams, dtype=torch.bool, device=CPU)
        self.can_improve = torch.ones(sentences, 1, dtype=torch.bool, device=CPU)
        self.numbers = torch.arange(sentences, device=CPU)  # indices of the sentences that are left
        self.found = self.finished.clone()  # [B, K, T]
        self.found_lengths = self.finished_lengths.clone()

    def run(self) -> torch.Tensor:
        """Run the search, and return the tokens of the best translations, `[B * num_return_sequences, T]`.

        B counts all sentences of the call.
        """
        tokens = self.running[:, : self.begin]
        while True:
            tokens = self.step(tokens)
            self.length += 1
            has_ended = self.has_ended()
            if self.length == self.config.max_length or (has_ended is not None and has_ended.all()):
                break
            if has_ended is not None and self.leaves and (kept := self.cache.leave_out(has_ended)) is not None:
                tokens = tokens.view(len(self.numbers), -1)[kept].view(-1, 1)
                self.keep(kept)
        self.store()
        returned = self.config.num_return_sequences
        length = self.begin + int(self.found_lengths[:, :returned].max())
        return self.found[:, :returned, :length].flatten(0, 1)

    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        """Read tokens `[L * K, T']`, and return the next tokens, `[L * K, 1]`."""
        sentences, beams = self.scores.shape
        log_probs = self.read(tokens)[:, -1].float().log_softmax(-1)
        if self.processors:
            changed = self.processors(self.running[:, : self.length], log_probs)
            log_probs = changed.to(torch.float32, copy=True)  # a processor may keep the tensor that it returns
        vocabulary = log_probs.shape[1]
        totals = log_probs.contiguous().view(sentences, beams, vocabulary).add_(self.scores[:, :, None])
        scores, places = best(totals.view(sentences, -1), self.candidates)  # [L, candidates], the best first
        parents = torch.div(places, vocabulary, rounding_mode="floor")
        tokens = places - parents * vocabulary
        parents += torch.arange(0, len(self.running), beams, device=CPU)[:, None]  # rows of `running`
        ends = torch.isin(tokens, self.ends) if self.length + 1 < self.config.max_length else tokens == tokens
        if ends.any():
            if ends[:, :beams].any():
                self.finish(scores[:, :beams], parents[:, :beams], tokens[:, :beams], ends[:, :beams])
            self.scores, chosen = torch.topk(scores + ends * -IMPOSSIBLE, beams)
            parents, tokens = parents.gather(1, chosen).flatten(), tokens.gather(1, chosen).flatten()
        else:
            self.scores = scores[:, :beams]
            parents, tokens = parents[:, :beams].flatten(), tokens[:, :beams].flatten()
        self.running = self.running.index_select(0, parents)
        self.running[:, self.length] = tokens
        self.cache.reorder_cache(parents)
        return tokens[:, None]

    def finish(self, scores: torch.Tensor, parents: torch.Tensor, tokens: torch.Tensor, ends: torch.Tensor) -> None:
        """Add the candidates that end, all `[L, K]`, to the finished beams, by the rules of Transformers."""
        candidates = self.running[parents]
        candidates[:, :, self.length] = tokens
        lengths = torch.full_like(self.finished_lengths, self.length + 1 - self.begin)
        self.finished, self.finished_scores, self.finished_lengths, self.is_finished = (
            self.model._update_finished_beams(
                sequences=self.finished,
                topk_running_sequences=candidates,
                beam_scores=self.finished_scores,
                topk_log_probs=scores,
                beam_indices=self.finished_lengths,  # the lengths, moved along; Transformers keeps and counts indices
                topk_running_beam_indices=lengths,
                is_early_stop_heuristic_unsatisfied=self.can_improve,
                is_sent_finished=self.is_finished,
                next_token_hits_stopping_criteria=ends,
                top_num_beam_mask=torch.ones(self.beams, dtype=torch.bool, device=CPU),
                num_beams=self.beams,
                cur_len=self.length,
                decoder_prompt_len=self.begin,
                length_penalty=self.config.length_penalty,
                early_stopping=self.config.early_stopping,
            )
        )

    def has_ended(self) -> torch.Tensor | None:
        """Return which sentences have a translation that can no longer change, `[L]`, or None if there are none."""
        all_finished = self.is_finished.all(1)
        cannot_go_on = self.scores[:, 0] < -IMPOSSIBLE / 2  # each beam of the sentence has ended, or is forbidden
        if not (all_finished | cannot_go_on).any():
            return None
        self.can_improve = self.model._check_early_stop_heuristic(
            is_early_stop_heuristic_unsatisfied=self.can_improve,
            running_beam_scores=self.scores,
            beam_scores=self.finished_scores,
            is_sent_finished=self.is_finished,
            cur_len=self.length,
            max_length=self.config.max_length,
            decoder_prompt_len=self.begin,
            early_stopping=self.config.early_stopping,
            length_penalty=self.config.length_penalty,
        )
        has_ended = ~self.can_improve[:, 0]
        return has_ended | all_finished if self.config.early_stopping is True else has_ended

    def keep(self, kept: torch.Tensor) -> None:
        """Store the results, and continue only with the sentences at the places `kept`."""
        self.store()
        self.numbers = self.numbers[kept]
        self.running = self.running.view(-1, self.beams, self.running.shape[1])[kept].flatten(0, 1)
        self.scores, self.can_improve, self.is_finished = (
            state[kept] for state in (self.scores, self.can_improve, self.is_finished)
        )
        self.finished, self.finished_scores, self.finished_lengths = (
            state[kept] for state in (self.finished, self.finished_scores, self.finished_lengths)
        )

    def store(self) -> None:
        """Store the results of the sentences that are left."""
        self.found[self.numbers], self.found_lengths[self.numbers] = self.finished, self.finished_lengths


def best(scores: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the `count` best of `scores` `[L, n]` and their places, the best first, as `torch.topk` does.

    This takes a third of the time of `torch.topk`. All results are in the `count` groups with the best maxima.
    """
    whole = scores.shape[1] // GROUP * GROUP
    if whole <= count * GROUP:
        return scores.topk(count)
    groups = scores[:, :whole].unflatten(1, (-1, GROUP)).amax(2).topk(count, sorted=False).indices
    places = (groups[:, :, None] * GROUP + torch.arange(GROUP, device=CPU)).flatten(1)
    if whole < scores.shape[1]:
        rest = torch.arange(whole, scores.shape[1], device=CPU).expand(len(scores), -1)
        places = torch.cat([places, rest], dim=1)
    values, among = scores.gather(1, places).topk(count)
    return values, places.gather(1, among)
