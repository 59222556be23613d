"""Translation: the result depends on the sentence alone, not on its batch, and the model stays unchanged."""

import copy
import logging
import math
import random
import threading
from dataclasses import fields, replace

import pytest
import torch
from word_models import WORDS, tiny_model, tiny_tokenizer

from hf_deepwide.errors import UserError
from hf_deepwide.evaluation.arguments import EvaluationArguments
from hf_deepwide.evaluation.translate import generate_beams, generate_ids, translate
from hf_deepwide.models.pipeline_translation import TranslationPipeline
from hf_deepwide.models.plain_text import sorted_batches
from hf_deepwide.models.saved_fields import LIMITS

QUICK = EvaluationArguments(num_beams=3, max_length_factor=1.0, max_length_offset=4)


@pytest.fixture
def model():
    return tiny_model()


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_tokenizer()


@pytest.fixture(scope="module")
def sources():
    rng = random.Random(0)
    return [" ".join(rng.choices(WORDS, k=rng.randint(1, 25))) for _ in range(40)]


@pytest.mark.parametrize("early_stopping", [True, False])
def test_equals_generate_of_each_sentence_alone(model, tokenizer, sources, early_stopping, caplog):
    model.final_logits_bias[0, tokenizer.eos_token_id] = 5.0  # sentences end early enough for both settings to matter
    model.generation_config.max_length = 30  # a checkpoint's own limit does not count, nor does it give warnings
    settings = {"num_beams": 3, "length_penalty": 2.0, "early_stopping": early_stopping}
    args = EvaluationArguments(max_length_factor=1.0, max_length_offset=4, **settings)
    generation_log = logging.getLogger("transformers.generation.utils")
    generation_log.addHandler(caplog.handler)  # Transformers' log does not reach pytest by itself
    translations = translate(model, tokenizer, sources, args)
    generation_log.removeHandler(caplog.handler)
    assert not warnings_in(caplog)
    assert len(set(translations)) > 10
    for name, other in (("length_penalty", 0.6), ("early_stopping", not early_stopping)):
        assert translate(model, tokenizer, sources, replace(args, **{name: other})) != translations
    for source, translation in zip(sources, translations, strict=True):
        ids = tokenizer(source, return_tensors="pt")["input_ids"]
        limit = math.ceil(ids.shape[1] / 8) * 8 + 4
        alone = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=limit, **settings)
        assert tokenizer.decode(alone[0], skip_special_tokens=True, clean_up_tokenization_spaces=False) == translation


@pytest.mark.parametrize("max_tokens", [1, 100, 100_000])
def test_order_and_batches_do_not_matter(model, tokenizer, sources, max_tokens):
    args = replace(QUICK, max_tokens=max_tokens)
    order = random.Random(1).sample(range(len(sources)), len(sources))
    expected = translate(model, tokenizer, sources, QUICK)
    assert translate(model, tokenizer, [sources[i] for i in order], args) == [expected[i] for i in order]


@pytest.mark.parametrize("beams", [1, 3])
def test_nothing_stands_behind_an_end_where_padding_is_0(beams, sources):
    """In this case Transformers pads shorter beams with end tokens, up to the longest translation of the batch."""
    model, tokenizer = tiny_model(), tiny_tokenizer()
    tokenizer.pad_token = "<s>"
    model.config.pad_token_id = 0
    model.generation_config.update(pad_token_id=0, eos_token_id=list(range(2, 16)), no_repeat_ngram_size=1)
    sources, settings = sources[:8], replace(QUICK, num_beams=beams)
    alone = [generate_ids(model, tokenizer, [source], settings)[0] for source in sources]
    assert len(set(map(len, alone))) > 1
    assert generate_ids(model, tokenizer, sources, settings) == alone

    pipeline = TranslationPipeline(model=model, tokenizer=tokenizer)
    options = {"num_beams": beams, "max_new_tokens": 9, "return_tensors": True}
    together = [result["translation_token_ids"].tolist() for result in pipeline(sources, **options)]
    assert together == [pipeline(source, **options)[0]["translation_token_ids"].tolist() for source in sources]


def test_beams_have_the_scores_that_the_model_gives_them(model, tokenizer, sources):
    sources = [*sources[:3], ""]
    args = replace(QUICK, num_beams=3, length_penalty=1.0)
    found = generate_beams(model, tokenizer, sources, args)
    assert [beams[0].ids if beams else [] for beams in found] == generate_ids(model, tokenizer, sources, args)
    assert [len(beams) for beams in found] == [3, 3, 3, 0]
    for source, beams in zip(sources, found, strict=True):
        assert [beam.score for beam in beams] == sorted((beam.score for beam in beams), reverse=True)
        for beam in beams:
            labels = torch.tensor([beam.ids])
            logits = model(**tokenizer(source, return_tensors="pt"), labels=labels).logits
            likely = logits.log_softmax(-1).gather(-1, labels[..., None]).mean().item()
            assert beam.score == pytest.approx(likely, abs=1e-4)
    assert [beam.score for beam in generate_beams(model, tokenizer, sources[:1], replace(args, num_beams=1))[0]] == [
        None
    ]


def test_batches_hold_each_sentence_once_within_max_tokens():
    rng = random.Random(0)
    lengths = [rng.randint(1, 60) for _ in range(300)] + [200]
    limits = [length // 20 for length in lengths]
    batches = list(sorted_batches(lengths, max_tokens=128, limits=limits))
    assert sorted(i for batch in batches for i in batch) == list(range(301))
    assert batches[0] == [300]  # longest first; alone, as it exceeds max_tokens
    for batch in batches[1:]:
        assert len(batch) * max(lengths[i] for i in batch) <= 128
        assert len({limits[i] for i in batch}) == 1
    assert len(batches) < 100


def test_restores_the_model_after_translation(model, tokenizer, sources):
    model.train()
    model.model.encoder.eval()  # a part frozen by its owner stays frozen
    model.config.use_cache = False
    modes = [module.training for module in model.modules()]
    config, values = model.generation_config, model.generation_config.to_dict()
    weights = copy.deepcopy(model.state_dict())
    random_state = torch.get_rng_state()
    translate(model, tokenizer, sources[:5], QUICK)
    assert [module.training for module in model.modules()] == modes
    assert model.generation_config is config
    assert config.to_dict() == values
    assert torch.equal(torch.get_rng_state(), random_state)
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())


def test_restores_the_model_after_a_failure(model, tokenizer, sources, monkeypatch):
    def fail(**_):
        assert not any(module.training for module in model.modules())
        raise MemoryError

    model.train()
    config = model.generation_config
    monkeypatch.setattr(model, "generate", fail)
    with pytest.raises(MemoryError):
        translate(model, tokenizer, sources, QUICK)
    assert all(module.training for module in model.modules())
    assert model.generation_config is config


def test_threads_take_turns_with_a_model(model, tokenizer, sources, monkeypatch):
    """A translating thread sets its search on the model. No other thread may take it for the model's own settings."""
    own, generate, seen, others = model.generation_config, model.generate, [], []

    def second():
        translate(model, tokenizer, sources[:1], replace(QUICK, num_beams=1))

    def observed(**inputs):
        seen.append(model.generation_config.num_beams)
        if not others:
            others.append(threading.Thread(target=second))
            others[0].start()
            others[0].join(0.3)
            seen.append(model.generation_config.num_beams)
        return generate(**inputs)

    monkeypatch.setattr(model, "generate", observed)
    translate(model, tokenizer, sources[:1], replace(QUICK, num_beams=3))
    others[0].join()
    assert seen == [3, 3, 1]
    assert model.generation_config is own


def test_dropout_is_off(model, tokenizer, sources):
    expected = translate(model, tokenizer, sources[:5], QUICK)
    model.train()
    assert translate(model, tokenizer, sources[:5], QUICK) == expected


def test_forced_first_token_of_the_checkpoint_is_kept(model, tokenizer, sources):
    model.generation_config.forced_bos_token_id = 7
    assert {row[0] for row in generate_ids(model, tokenizer, sources, QUICK)} == {7}


def test_does_not_clean_up_text(model, tokenizer, sources):
    """Cleaning up "do n't ." to "don't." would change scores on tokenised text."""
    ids = generate_ids(model, tokenizer, sources, QUICK)
    texts = translate(model, tokenizer, sources, QUICK)
    words = [[token for token in tokenizer.convert_ids_to_tokens(row) if token in WORDS] for row in ids]
    assert texts == [" ".join(row) for row in words]
    assert any(" ." in text or " n't" in text or " 's" in text or " ," in text for text in texts)


def warnings_in(caplog):
    """The warnings and errors in the log: a command in another test may have switched progress messages on."""
    return [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_long_sources_are_cut_with_one_warning(model, tokenizer, sources, caplog):
    long = [sources[0], "w1 w2 " * 50, sources[1], "w3 " * 64]
    with caplog.at_level(logging.WARNING, logger="hf_deepwide"):
        translations = translate(model, tokenizer, long, QUICK)
    (record,) = [record for record in warnings_in(caplog) if record.name.startswith("hf_deepwide")]
    assert "2 of 4 sources cut to the 64 tokens" in record.getMessage()
    assert "lines 2, 4" in record.getMessage()
    caplog.clear()
    translate(model, tokenizer, long, QUICK, first_line=2049)
    assert "lines 2050, 2052" in caplog.text
    caplog.clear()
    cut = ["w1 w2 " * 31 + "w1", "w3 " * 63]  # 63 words and the end of sentence
    assert translate(model, tokenizer, cut, QUICK) == translations[1::2]
    assert not warnings_in(caplog)


@pytest.mark.parametrize(("factor", "offset", "expected"), [(0.0, 5, [5, 5]), (1.5, 3, [15, 27]), (9.0, 0, [64, 64])])
def test_length_limit_is_linear_in_the_source_and_within_the_model(model, tokenizer, factor, offset, expected):
    with torch.no_grad():
        model.final_logits_bias[0, [1, 2]] = -1e9  # a model that never ends
    args = EvaluationArguments(num_beams=2, max_length_factor=factor, max_length_offset=offset)
    texts = ["w1 w2 w3", "w1 " * 12]  # 4 and 13 tokens, rounded up to 8 and 16
    assert [len(row) for row in generate_ids(model, tokenizer, texts, args)] == expected
    for name in LIMITS:  # as a run saves them
        setattr(model.config, name, getattr(args, name))
    pipe = TranslationPipeline(model=model, tokenizer=tokenizer)
    for given in (texts, texts[::-1]):
        found = [result["translation_token_ids"] for result in pipe(given, return_tensors=True)]
        assert [len(ids) - 1 for ids in found] == (expected if given is texts else expected[::-1])
    assert [len(pipe(text, return_tensors=True)[0]["translation_token_ids"]) - 1 for text in texts] == expected
    (shorter,) = pipe([texts[0]], return_tensors=True, max_new_tokens=4)
    assert len(shorter["translation_token_ids"]) == 5


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_precision_is_an_autocast(model, tokenizer, precision):
    seen = set()
    model.lm_head.register_forward_hook(lambda *args: seen.add(args[-1].dtype))
    args = EvaluationArguments(num_beams=1, max_length_factor=0, max_length_offset=3, precision=precision)
    translate(model, tokenizer, ["w1 w2"], args)
    assert seen == {getattr(torch, precision)}


def test_nothing_and_empty_lines(model, tokenizer):
    assert translate(model, tokenizer, [], QUICK) == []
    assert len(translate(model, tokenizer, ["", "w1"], QUICK)) == 2


def test_a_lone_string_is_refused(model, tokenizer):
    with pytest.raises(UserError, match="a list of sentences is wanted"):
        translate(model, tokenizer, "w1 w2", QUICK)


def test_every_setting_is_explained():
    assert all(field.metadata.get("help") for field in fields(EvaluationArguments))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_beams": 0}, "evaluation.num_beams is 0; accepted: 1 or more"),
        ({"max_tokens": -1}, "evaluation.max_tokens"),
        ({"bootstrap_samples": 0}, "evaluation.bootstrap_samples"),
        ({"max_length_offset": -1}, "evaluation.max_length_offset"),
        ({"max_length_factor": -0.5}, "evaluation.max_length_factor"),
        ({"max_length_factor": 0, "max_length_offset": 0}, "leaves no room for a translation"),
        ({"precision": "fp16"}, "evaluation.precision: 'fp16'; accepted: float32, bfloat16, float16"),
        ({"metrics": ["blue"]}, "metrics: blue; accepted"),
        ({"tokenize": "moses"}, "tokenize: 'moses'; accepted"),
    ],
)
def test_settings_are_checked(settings, message):
    with pytest.raises(UserError, match=message):
        EvaluationArguments(**settings)
