"""Random translations: they follow the model's distribution, and do not depend on the batch."""

import math
import random
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import GenerationConfig
from word_models import WORDS, tiny_model, tiny_tokenizer

import hf_deepwide_cli
from hf_deepwide.errors import UserError
from hf_deepwide.evaluation.arguments import EvaluationArguments
from hf_deepwide.evaluation.sampling import SamplingArguments, SamplingLogitsProcessor, uniform
from hf_deepwide.evaluation.translate import generate_ids, translate

ONE = EvaluationArguments(num_beams=1, max_length_factor=1.0, max_length_offset=4)


@pytest.fixture(scope="module")
def model():
    return tiny_model()


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_tokenizer()


@pytest.fixture(scope="module")
def sources():
    rng = random.Random(0)
    return [" ".join(rng.choices(WORDS, k=rng.randint(1, 25))) for _ in range(30)]


def drawn_naively(model, tokenizer, source: str, args: SamplingArguments) -> list[int]:
    """Draw a translation by loops: each token is the first at which the summed probability exceeds u."""
    ids = tokenizer(source, return_tensors="pt")["input_ids"]
    numbers = uniform(source, 100, args.seed)
    output = [model.generation_config.decoder_start_token_id]
    for step in range(math.ceil(ids.shape[1] / 8) * 8 + 4):
        with torch.no_grad():
            logits = model(input_ids=ids, decoder_input_ids=torch.tensor([output])).logits[0, -1].tolist()
        logits = [logit / args.temperature for logit in logits]
        likeliest = sorted(logits, reverse=True)[: args.top_k or len(logits)]
        weights = [math.exp(logit) if logit in likeliest else 0.0 for logit in logits]
        left = numbers[step] * math.fsum(weights)
        token = -1
        while left >= 0:
            token += 1
            left -= weights[token]
        output.append(token)
        if token == tokenizer.eos_token_id:
            break
    while output[-1] == tokenizer.pad_token_id:  # this model can draw padding; at the end it is stripped
        output.pop()
    return output[1:]


@pytest.mark.parametrize("options", [{}, {"temperature": 0.5}, {"top_k": 3}, {"seed": 7}])
def test_each_word_is_drawn_from_the_model(options, model, tokenizer, sources):
    args, sources = SamplingArguments(**options), sources[:12]
    drawn = generate_ids(model, tokenizer, sources, ONE, sampling=args)
    assert drawn == [drawn_naively(model, tokenizer, source, args) for source in sources]
    assert drawn != generate_ids(model, tokenizer, sources, ONE)


def test_words_occur_as_often_as_the_model_says():
    """Draw for 20,000 texts with the same logits."""
    logits = torch.tensor([0.0, 1.0, -1.0, 2.0, -torch.inf])
    rows = 20_000
    processor = SamplingLogitsProcessor([str(row) for row in range(rows)], 2, SamplingArguments())
    for _ in range(2):
        scores = processor(torch.zeros(rows, 1), logits.expand(rows, -1))
        assert torch.equal(scores.exp().sum(-1), torch.ones(rows)), "one token is left in each row"
        counts = Counter(scores.argmax(-1).tolist())
        for token, p in enumerate(logits.softmax(0).tolist()):
            assert abs(counts[token] - rows * p) <= 4 * math.sqrt(rows * p * (1 - p))


def test_a_number_next_to_one_draws_a_possible_word():
    """Rounding must not choose a word behind the last word with a probability above 0."""
    processor = SamplingLogitsProcessor(["text"], 1, SamplingArguments())
    processor._numbers.fill_(1.0)
    assert processor(torch.zeros(1, 1), torch.tensor([[0.1, 0.2, 0.3, -torch.inf]])).argmax() == 2


def test_the_likeliest_word_alone_is_greedy_search(model, tokenizer, sources):
    greedy = translate(model, tokenizer, sources, ONE)
    for options in ({"top_k": 1}, {"temperature": 1e-4}):
        assert translate(model, tokenizer, sources, ONE, sampling=SamplingArguments(**options)) == greedy


@pytest.mark.parametrize("max_tokens", [1, 100])
def test_neither_order_nor_batch_nor_time_matters(model, tokenizer, sources, max_tokens):
    args, order = SamplingArguments(seed=5), random.Random(1).sample(range(30), 30)
    torch.manual_seed(3)
    state = torch.get_rng_state()
    once = translate(model, tokenizer, sources, ONE, sampling=args)
    again = translate(
        model, tokenizer, [sources[i] for i in order], replace(ONE, max_tokens=max_tokens), sampling=args
    )
    assert again == [once[i] for i in order]
    assert torch.equal(torch.get_rng_state(), state), "no generator of others is touched"
    assert translate(model, tokenizer, sources, ONE, sampling=SamplingArguments(seed=6)) != once


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": 0.0}, "--temperature is 0.0; accepted: more than 0"),
        ({"temperature": math.nan}, "--temperature is nan"),
        ({"top_k": -1}, "--top_k is -1; accepted: 0 or more"),
        ({"seed": -1}, "--seed is -1; accepted: 0 or more"),
    ],
)
def test_settings_are_checked(options, message):
    with pytest.raises(UserError, match=message):
        SamplingArguments(**options)


def test_beams_are_not_drawn(model, tokenizer):
    with pytest.raises(UserError, match="num_beams is 3; set num_beams to 1"):
        translate(model, tokenizer, ["a"], replace(ONE, num_beams=3), sampling=SamplingArguments())


@pytest.fixture
def run(model, tokenizer, sources, tmp_path, monkeypatch):
    """Return a function that runs `hf-deepwide translate` in a folder with the model and the sources."""
    monkeypatch.chdir(tmp_path)
    model.save_pretrained("checkpoint")
    tokenizer.save_pretrained("checkpoint")
    Path("mono.txt").write_text("".join(f"{source}\n" for source in sources), encoding="utf-8")

    def run(*words: str) -> list[str]:
        command = ["hf-deepwide", "translate", "--model", "checkpoint", "--input", "mono.txt", "--output", "out.txt"]
        monkeypatch.setattr(sys, "argv", [*command, *words])
        hf_deepwide_cli.main()
        return Path("out.txt").read_text(encoding="utf-8").splitlines()

    return run


def test_the_command_goes_on_with_what_it_would_have_drawn(run, model, tokenizer, sources):
    drawn = run("--sample", "--seed", "3", "--temperature", "0.8", "--top_k", "9")
    args = EvaluationArguments(num_beams=1)
    assert drawn == translate(model, tokenizer, sources, args, sampling=SamplingArguments(0.8, 9, 3))
    Path("out.txt").write_text("".join(f"{line}\n" for line in drawn[:11]) + "half a l", encoding="utf-8")
    assert run("--sample", "--seed", "3", "--temperature", "0.8", "--top_k", "9", "--resume") == drawn


def test_the_command_searches_unless_it_samples(run, model, tokenizer, sources):
    assert run() == translate(model, tokenizer, sources, EvaluationArguments(num_beams=5))


def test_the_command_searches_as_the_model_was_saved_to(run, model, tokenizer, sources):
    """As with `pipeline`. Options override the saved settings."""
    own = {"num_beams": 3, "length_penalty": -4.0, "early_stopping": False}
    saved = GenerationConfig.from_pretrained("checkpoint")
    saved.update(**own)
    saved.save_pretrained("checkpoint")
    expected = translate(model, tokenizer, sources, EvaluationArguments(**own))
    assert expected != translate(model, tokenizer, sources, EvaluationArguments(num_beams=3))
    assert run() == expected
    assert run("--num_beams", "1", "--overwrite") == translate(
        model, tokenizer, sources, EvaluationArguments(num_beams=1)
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--seed", "3"], "--seed is for drawing translations at random; add --sample"),
        (["--sample", "--length_penalty", "2"], "--length_penalty is for searching"),
        (["--sample", "--num_beams", "5"], "--sample draws one translation, and --num_beams 5 searches"),
        (["--sample", "--temperature", "0"], "--temperature is 0.0; accepted: more than 0"),
    ],
)
def test_the_command_refuses_what_would_have_no_effect(run, words, message, capsys):
    with pytest.raises(SystemExit):
        run(*words)
    assert message in capsys.readouterr().err
    assert not Path("out.txt").exists()
