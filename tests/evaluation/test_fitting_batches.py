"""Memory that runs out while a model translates or scores: smaller batches, and the same results."""

import logging
import math
import random

import pytest
import torch
from word_models import WORDS, tiny_model, tiny_tokenizer

from hf_deepwide.errors import UserError
from hf_deepwide.evaluation.arguments import EvaluationArguments
from hf_deepwide.evaluation.fitting_batches import in_fitting_batches
from hf_deepwide.evaluation.forced_decoding import score_targets
from hf_deepwide.evaluation.translate import translate

CUDA = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


def settings(**fields):
    return EvaluationArguments(num_beams=3, max_length_factor=1.0, max_length_offset=4, **fields)


def limited(tokens, seen, error=CUDA):
    """Return a pre-hook that raises `error` for more than `tokens` token ids, and adds batch shapes to `seen`."""

    def check(module, args, kwargs):
        ids = kwargs["input_ids"]
        seen.append(tuple(ids.shape))
        if ids.numel() > tokens:
            raise error

    return check


@pytest.fixture
def sources():
    rng = random.Random(0)
    return [" ".join(rng.choices(WORDS, k=rng.randint(1, 25))) for _ in range(40)]


def test_translations_are_the_same(sources, caplog):
    model, tokenizer, seen = tiny_model(), tiny_tokenizer(), []
    expected = translate(model, tokenizer, sources, settings())
    hook = model.model.encoder.register_forward_pre_hook(limited(100, seen), with_kwargs=True)
    args = settings()
    assert translate(model, tokenizer, sources, args) == expected
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert 50 <= args.max_tokens <= 100  # halved until it fitted, and no more
    failed = [shape for shape in seen if math.prod(shape) > 100]
    assert len(failed) == len(warnings) == len(set(failed))  # each size was tried once
    rows, width = failed[0]
    assert warnings[0] == (
        f"memory ran out on a batch of {rows} sentences of up to {width} tokens. From here on a batch has at most "
        f"{rows * width // 2} tokens (max_tokens)"
    )
    seen.clear()
    assert translate(model, tokenizer, sources, args) == expected  # the lower limit holds from now on
    assert max(map(math.prod, seen)) <= 100
    hook.remove()


def test_scores_are_the_same(sources):
    model, tokenizer, seen = tiny_model(), tiny_tokenizer(), []
    targets = sources[::-1]
    expected = score_targets(model, tokenizer, sources, targets, settings())
    model.register_forward_pre_hook(limited(100, seen), with_kwargs=True)
    found = score_targets(model, tokenizer, sources, targets, settings())
    assert [score.tokens for score in found] == [score.tokens for score in expected]
    assert [score.log_probability for score in found] == pytest.approx(
        [score.log_probability for score in expected], abs=1e-4
    )
    assert min(map(math.prod, seen)) < max(map(math.prod, seen))


def test_each_sentence_is_computed_once():
    rng = random.Random(1)
    lengths = [rng.randint(1, 30) for _ in range(200)]
    limits, tried, args = [length // 10 for length in lengths], [], settings(max_tokens=1000)

    def compute(batch):
        tried.append(batch)
        if len(batch) * lengths[batch[0]] > 130:
            raise RuntimeError("CUDA failed with error out of memory")
        return [lengths[number] for number in batch]

    done = {}
    for batch, found in in_fitting_batches(compute, lengths, args, limits):
        assert len({limits[number] for number in batch}) == 1
        done |= dict(zip(batch, found, strict=True))
    assert done == dict(enumerate(lengths))
    fitted = [batch for batch in tried if len(batch) * lengths[batch[0]] <= 130]
    assert sum(map(len, fitted)) == len(lengths)


def test_batches_that_were_computed_before_are_not_computed_again():
    """Memory runs out in the third batch: another program may have taken it meanwhile."""
    lengths, tried, args = [10] * 9 + [20] * 9, [], settings(max_tokens=60)

    def compute(batch):
        tried.append(batch)
        if len(tried) == 3:
            raise CUDA
        return batch

    yielded = [batch for batch, _ in in_fitting_batches(compute, lengths, args)]
    assert args.max_tokens == 30
    assert yielded == tried[:2] + tried[3:]
    assert sorted(number for batch in yielded for number in batch) == list(range(18))


def test_one_sentence_that_does_not_fit_is_an_error(sources):
    model, tokenizer = tiny_model(), tiny_tokenizer()
    model.model.encoder.register_forward_pre_hook(limited(9, []), with_kwargs=True)
    words = r"memory ran out on one sentence of \d\d tokens. Search with fewer beams \(num_beams is 3\)"
    with pytest.raises(UserError, match=words):
        translate(model, tokenizer, sources, settings())


def test_other_errors_are_not_taken_for_it(sources):
    model, tokenizer = tiny_model(), tiny_tokenizer()
    error = RuntimeError("shapes do not match")
    model.model.encoder.register_forward_pre_hook(limited(9, [], error), with_kwargs=True)
    with pytest.raises(RuntimeError, match="shapes do not match"):
        translate(model, tokenizer, sources, settings())
