"""Forced decoding: scores of given translations, against sums written out and against those of beam search."""

import json
import sys

import pytest
import torch
from coded_languages import KINDS, SIZES, make_base
from model_cases import scramble
from word_models import tiny_model, tiny_tokenizer

from hf_deepwide.errors import UserError
from hf_deepwide.evaluation.arguments import EvaluationArguments
from hf_deepwide.evaluation.forced_decoding import score_targets
from hf_deepwide.models.language_pairs import language_ids
from hf_deepwide_cli import main

SEARCH = EvaluationArguments(num_beams=3, max_length_factor=1.0, max_length_offset=4, max_tokens=40)
SOURCES = ["w1 w2 w3 w4", "w5", "w2 w2 w7 w8 w9 w1 w3"]
TARGETS = ["w4 w1", "w3 w2 w9 w6 w6 w1", "w2"]


def naive(model, source, target):
    """sum_t log softmax(logits_t)[y_t], sentence by sentence and token by token."""
    total = 0.0
    for step, token in enumerate(target):
        begun = torch.tensor([[model.config.decoder_start_token_id, *target[:step]]])
        logits = model(input_ids=torch.tensor([source]), decoder_input_ids=begun).logits[0, -1]
        total += (logits[token] - torch.logsumexp(logits, 0)).item()
    return total


def test_scores_are_sums_of_log_probabilities():
    model, tokenizer = tiny_model().double(), tiny_tokenizer()
    found = score_targets(model, tokenizer, SOURCES, TARGETS, SEARCH)
    for source, target, score in zip(SOURCES, TARGETS, found, strict=True):
        ids = tokenizer(text_target=target)["input_ids"]
        assert score.tokens == len(ids)
        assert score.log_probability == pytest.approx(naive(model, tokenizer(source)["input_ids"], ids), abs=1e-5)
    assert score_targets(model, tokenizer, SOURCES[1:2], TARGETS[1:2], SEARCH)[0].log_probability == pytest.approx(
        found[1].log_probability, abs=1e-5
    )


@pytest.mark.parametrize("kind", KINDS)
def test_scores_are_those_of_a_search_that_may_find_nothing_else(kind, tmp_path):
    """With a language code that begins the translation, or that the decoder starts from."""
    make, model_class, config_class, source_lang, target_lang, begins = KINDS[kind]
    tokenizer = make(tmp_path)
    ids = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("pad", "bos", "eos")}
    torch.manual_seed(0)
    codes = language_ids(tokenizer)
    size = max(len(tokenizer), *codes.values()) + 1
    model = model_class(config_class(vocab_size=size, decoder_start_token_id=tokenizer.eos_token_id, **ids, **SIZES))
    model = scramble(model).eval()
    model.generation_config.forced_eos_token_id = None
    (score,) = score_targets(model, tokenizer, ["a b"], ["c d d"], SEARCH, source_lang, target_lang)

    tokenizer.src_lang, code = source_lang, codes[target_lang]
    body = tokenizer("c d d", add_special_tokens=False)["input_ids"]
    path = [*([code] if begins else []), *body, tokenizer.eos_token_id]
    found = model.generate(
        **tokenizer("a b", return_tensors="pt"),
        **{"forced_bos_token_id" if begins else "decoder_start_token_id": code},
        prefix_allowed_tokens_fn=lambda _, begun: [[*path, tokenizer.pad_token_id][min(len(begun) - 1, len(path))]],
        num_beams=2, length_penalty=1.0, max_new_tokens=len(path), output_scores=True, return_dict_in_generate=True,
    )  # fmt: skip
    assert found.sequences[0, 1:].tolist() == path
    assert score.tokens == len(path)
    assert score.log_probability / score.tokens == pytest.approx(found.sequences_scores[0].item(), abs=1e-4)


def test_a_code_behind_the_end_is_scored_in_front(tmp_path):
    """The search forces the code at the front. NLLB's legacy tokenizer puts the code behind the end."""
    model, tokenizer = make_base("nllb", tmp_path / "base", init_std=0.5)
    tokenizer.legacy_behaviour = True
    code, body = language_ids(tokenizer)["eng_Latn"], tokenizer("c d d", add_special_tokens=False)["input_ids"]
    tokenizer.src_lang = "deu_Latn"
    source = tokenizer("a b")["input_ids"]
    assert source[-1] == language_ids(tokenizer)["deu_Latn"]
    (score,) = score_targets(model, tokenizer, ["a b"], ["c d d"], SEARCH, "deu_Latn", "eng_Latn")
    path = [code, *body, tokenizer.eos_token_id]
    forced = naive(model, source, path[:1])
    assert score.tokens == len(path)
    assert score.log_probability == pytest.approx(naive(model, source, path) - forced, abs=1e-4)


def ending_model():
    """A model whose translations end by themselves."""
    model = tiny_model()
    model.final_logits_bias[:, model.config.eos_token_id] = 6
    return model


@pytest.fixture
def folder(tmp_path):
    ending_model().save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    for name, lines in (("source", SOURCES), ("target", TARGETS)):
        (tmp_path / name).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return tmp_path


def test_commands_list_translations_and_score_them(folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    search = ["--model", "model", "--input", "source", "--output", "lists.jsonl", "--num_beams", "3"]
    monkeypatch.setattr(sys, "argv", ["hf-deepwide", "translate", *search, "--n_best", "2"])
    main()
    lists = [json.loads(line) for line in (folder / "lists.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [len(best) for best in lists] == [2] * len(SOURCES)
    model, tokenizer = ending_model(), tiny_tokenizer()
    for source, best in zip(SOURCES, lists, strict=True):
        for score, each in zip(
            score_targets(model, tokenizer, [source] * 2, [each["text"] for each in best], SEARCH), best, strict=True
        ):
            assert score.log_probability / score.tokens == pytest.approx(each["score"], abs=1e-4)
    scoring = ["--model", "model", "--source", "source", "--target", "target"]
    monkeypatch.setattr(sys, "argv", ["hf-deepwide", "score", *scoring])
    main()
    lines = [line.split("\t") for line in capsys.readouterr().out.splitlines()]
    expected = score_targets(model, tokenizer, SOURCES, TARGETS, SEARCH)
    assert [int(tokens) for _, tokens in lines] == [score.tokens for score in expected]
    assert [float(score) for score, _ in lines] == pytest.approx(
        [score.log_probability for score in expected], abs=1e-3
    )


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--n_best", "6"], "--n_best is 6; accepted: 2 to the beam size, which is 5"),
        (["--n_best", "2", "--sample"], "give only one"),
    ],
)
def test_lists_that_no_search_makes_are_refused(words, told, folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", ["hf-deepwide", "translate", "--model", "model", "--input", "source", *words])
    with pytest.raises(SystemExit):
        main()
    assert told in capsys.readouterr().err


def test_mistakes_are_named():
    model, tokenizer = tiny_model(), tiny_tokenizer()
    with pytest.raises(UserError, match="line 2: the target has"):
        score_targets(model, tokenizer, ["w1", "w2"], ["w1", "w2 " * 5000], SEARCH)
    with pytest.raises(UserError, match="sources"):
        score_targets(model, tokenizer, ["w1", "w2"], ["w1"], SEARCH)
