"""Our loops of `generate` find the tokens that Transformers' loops find, and run only where they can."""

import math

import pytest
import torch
from model_cases import WITH_TWIN, build, needs_transformers
from transformers import LogitsProcessor, MaxLengthCriteria, MaxTimeCriteria, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer
from transformers.modeling_outputs import BaseModelOutput

from hf_deepwide import VanillaTransformerForConditionalGeneration
from hf_deepwide.models import modeling_base, search
from hf_deepwide.models.cache_name import CACHE_NAME, with_old_name
from hf_deepwide.models.decoding import DecodingCache

SENTENCES, NEW = 16, 24


class EndsNowAndThen(LogitsProcessor):
    """Ends a row where the sum of its tokens is a multiple of three. So sentences end at different lengths."""

    def __call__(self, input_ids, scores):
        scores[:, 2] = torch.where(input_ids.sum(1) % 3 == 0, scores.amax(1) + 1, -math.inf)
        return scores


def sources(model):
    """Sixteen sentences of different lengths."""
    ids = torch.randint(4, 37, (SENTENCES, 7), generator=torch.Generator().manual_seed(5))
    lengths = torch.arange(SENTENCES)[:, None] % 7
    inputs = {"input_ids": ids, "attention_mask": (torch.arange(7) <= lengths).long()}
    if getattr(model.config, "num_posteriors", 1) > 1:
        inputs["posteriors"] = torch.arange(SENTENCES) % model.config.num_posteriors
    return inputs


def translate(model, **options):
    """Tokens of translations that end at different lengths."""
    options = {"max_new_tokens": NEW, "eos_token_id": 2, "do_sample": False, "no_repeat_ngram_size": 1} | options
    options.setdefault("logits_processor", [EndsNowAndThen()])
    torch.manual_seed(0)
    return model.generate(**sources(model), **options)


@pytest.fixture
def caches(monkeypatch):
    """A list of the caches that our loops have used."""
    seen = []

    def watch(loop):
        def run(model, input_ids, past_key_values, **asked):
            seen.append(past_key_values)
            return loop(model, input_ids, past_key_values=past_key_values, **asked)

        return run

    monkeypatch.setattr(modeling_base, "search_rows", watch(search.search_rows))
    monkeypatch.setattr(modeling_base, "BeamSearch", watch(search.BeamSearch))
    monkeypatch.setattr(search, "ROW_BY_ROW", (*search.ROW_BY_ROW, EndsNowAndThen))
    return seen


@pytest.fixture
def theirs(monkeypatch):
    """A function that replaces our loops and our fast decoder by Transformers' loops and the ordinary decoder."""

    def switch():
        monkeypatch.setattr(modeling_base, "can_search", lambda **asked: False)
        monkeypatch.setattr(modeling_base, "can_decode", lambda *args: False)

    return switch


SEARCHES = {
    "greedy": {},
    "beams": {"num_beams": 5, "num_return_sequences": 2},
    "beams until the best": {"num_beams": 3},
    "beams until the first": {"num_beams": 3, "early_stopping": True},
    "beams to the end": {"num_beams": 3, "early_stopping": "never", "length_penalty": 2.0},
    "short beams": {"num_beams": 4, "length_penalty": -1.0},
    "beams without a penalty": {"num_beams": 4, "length_penalty": 0.0, "early_stopping": "never"},
}
OF_THREE = "latent-both of three posteriors"


@pytest.mark.parametrize(
    ("case", "options"),
    [(case, SEARCHES["beams until the best"]) for case in WITH_TWIN]
    + [(case, SEARCHES["greedy"]) for case in ("mat-3", "multipath-2", "lstm")]
    + [(case, options) for case in ("vanilla", OF_THREE) for options in SEARCHES.values()],
)
def test_sentences_leave_without_a_change_of_any_token(case, options, caches, theirs):
    """A sentence leaves the batch as soon as its translation is final."""
    if case == "mat-3-two-vocabularies" and "num_beams" in options:
        needs_transformers("5.18", "beam search with two vocabularies")
    name, *several = case.split(" of ")
    model = build(name, **{"num_posteriors": 3} if several else {}).double()
    if several:
        with torch.no_grad():
            model.model.decoder.layer_selection.layer_logits.copy_(torch.randn(3, 3))
    got = translate(model, **options)
    (cache,) = caches
    expected = (16,) if options.get("early_stopping") == "never" and options["length_penalty"] > 0 else (4, 8, 12)
    assert len(cache.memory) in expected, "a longer translation could still be better by such a penalty"
    theirs()
    assert torch.equal(got, translate(model, **options))


OTHER_RULES = {
    "two ends": {"eos_token_id": [2, 9]},
    "no end": {"eos_token_id": None, "pad_token_id": 1},
    "a language": {"forced_bos_token_id": 11},
    "forbidden tokens": {"bad_words_ids": [[5], [7, 8]]},
    "a least length": {"min_new_tokens": 6},
    "an end at the last": {"forced_eos_token_id": 2},
    "padding of 0": {"pad_token_id": 0},
    "one token": {"max_new_tokens": 1},
    "a prompt": {"decoder_input_ids": torch.tensor([[2, 11, 12]]).expand(SENTENCES, -1)},
    "a processor that sees all rows": {"logits_processor": [EndsNowAndThen()]},
    "repetition": {"repetition_penalty": 1.7, "no_repeat_ngram_size": 0},
    "32-bit ids": {"decoder_input_ids": torch.full((SENTENCES, 1), 2, dtype=torch.int32)},
}


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("rule", OTHER_RULES)
def test_other_rules_hold(rule, beams, caches, theirs, monkeypatch):
    if rule == "a processor that sees all rows":
        monkeypatch.setattr(search, "ROW_BY_ROW", ())
    model = build("vanilla").double()
    options = {"num_beams": beams, "logits_processor": []} | OTHER_RULES[rule]
    got = translate(model, **options)
    (cache,) = caches
    if rule == "a processor that sees all rows":
        assert len(cache.memory) == SENTENCES, "it would see other rows than it is made for"
    theirs()
    expected = translate(model, **options)
    assert got.dtype == expected.dtype
    assert torch.equal(got, expected)
    assert len(caches) == 1


@pytest.mark.parametrize("ends", [{}, {"eos_token_id": None, "pad_token_id": 1}, {"eos_token_id": [2, 4, 11, 18, 25]}])
def test_samples_are_those_of_transformers(caches, theirs, ends):
    """Also when some sentences have ended: the other sentences still get the same random numbers."""
    options = {"do_sample": True, "num_return_sequences": 3, "top_k": 8, "temperature": 0.7, "logits_processor": []}
    model = build("vanilla").double()
    got = translate(model, **options, **ends)
    assert len(caches[0].memory) == SENTENCES
    theirs()
    assert torch.equal(got, translate(model, **options, **ends))


class Silent(BaseStreamer):
    def put(self, value):
        pass

    def end(self):
        pass


@pytest.mark.parametrize(
    "options",
    [
        {"return_dict_in_generate": True},
        {"streamer": Silent()},
        {"stopping_criteria": StoppingCriteriaList([MaxTimeCriteria(60.0)])},
        {"stopping_criteria": StoppingCriteriaList([MaxLengthCriteria(5)])},
        {"do_sample": True, "num_beams": 2},
        {"use_cache": False},
    ],
    ids=lambda options: next(iter(options)),
)
def test_asked_for_more_transformers_searches(options, caches):
    translate(build("vanilla"), **options)
    assert caches == []


FEW_TOKENS = {
    "one token, one language": {"forced_bos_token_id": 11, "max_new_tokens": 1, "num_return_sequences": 4},
    "two ends at the last": {"forced_eos_token_id": [2, 9], "eos_token_id": [2, 9]},
    "three translations": {
        "prefix_allowed_tokens_fn": lambda batch, ids: {1: [5, 6, 7]}.get(len(ids), [2]), "num_return_sequences": 4,
    },
}  # fmt: skip


@pytest.mark.parametrize("case", ["vanilla", "mat-3", "lstm"])
@pytest.mark.parametrize("few", FEW_TOKENS)
def test_where_few_tokens_are_left_impossible_beams_are_those_of_transformers(few, case, caches, theirs):
    model = build(case).double()
    options = {"num_beams": 4, "logits_processor": [], "pad_token_id": 1} | FEW_TOKENS[few]
    got = translate(model, **options)
    assert caches == []
    theirs()
    assert torch.equal(got, translate(model, **options))


def test_a_penalty_beyond_what_transformers_scores_bear_is_left_to_its_loops(caches, theirs):
    model = build("vanilla").double()
    options = {"num_beams": 3, "length_penalty": -9.0, "logits_processor": []}
    got = translate(model, **options)
    assert caches == []
    theirs()
    assert torch.equal(got, translate(model, **options))


class Keeps(LogitsProcessor):
    """Returns its own tensor at each call, at the second call as bfloat16."""

    def __init__(self, views):
        self.views, self.own, self.given = views, None, []

    def __call__(self, input_ids, scores):
        if self.own is None:
            generator = torch.Generator().manual_seed(1)
            self.own = torch.randn(scores.shape, generator=generator).log_softmax(-1)
        self.given.append(scores.exp().sum(-1))
        if self.views:
            input_ids.view(-1)
        return self.own.bfloat16() if len(self.given) == 2 else self.own


@pytest.mark.parametrize("beams", [1, 3])
def test_what_a_processor_keeps_is_its_own(beams, caches, theirs, monkeypatch):
    monkeypatch.setattr(search, "ROW_BY_ROW", ())
    model = build("vanilla").double()
    ours, others = (Keeps(views=beams == 1) for _ in range(2))  # Transformers' beams are not contiguous
    options = {"num_beams": beams, "no_repeat_ngram_size": 0, "max_new_tokens": 6}
    got = translate(model, logits_processor=[ours], **options)
    assert len(caches) == 1
    theirs()
    assert torch.equal(got, translate(model, logits_processor=[others], **options))
    assert torch.equal(ours.own, others.own)


def test_scores_are_float32_whatever_is_the_default(caches):
    torch.set_default_dtype(torch.float16)
    try:
        translate(build("vanilla").float(), num_beams=3)
    finally:
        torch.set_default_dtype(torch.float32)
    assert len(caches) == 1


def test_a_hook_may_change_logits_in_place(theirs):
    model = build("vanilla")

    def prefer(module, inputs, output):
        output.logits[..., 5] = 1e4

    model.register_forward_hook(prefer)
    got = translate(model, logits_processor=[], no_repeat_ngram_size=0)
    assert (got[:, 1:] == 5).all()


@pytest.mark.parametrize("beams", [1, 3])
def test_a_limit_that_is_never_reached_takes_no_memory(beams, caches):
    model = build("vanilla").double()
    few = translate(model, num_beams=beams)
    many = translate(model, num_beams=beams, max_new_tokens=None, max_length=10**30)
    assert len(caches) == 2
    assert torch.equal(many, few)


@pytest.mark.parametrize("length_penalty", [-1.0, 0.0, 1.0])
def test_constraints_are_not_asked_beyond_the_end(length_penalty, caches, theirs):
    """Two translations of two tokens are allowed: when both have ended, no beam can go on."""
    model, asked = build("vanilla").double(), []

    def allowed(row, tokens):
        asked.append(tuple(tokens.tolist()))
        return [5, 6] if len(tokens) == 1 else [2]

    options = {"num_beams": 3, "length_penalty": length_penalty, "prefix_allowed_tokens_fn": allowed}
    options |= {"logits_processor": [], "no_repeat_ngram_size": 0}
    got, ours = translate(model, **options), set(asked)
    assert len(caches) == 1
    asked.clear()
    theirs()
    assert torch.equal(got, translate(model, **options))
    assert max(map(len, ours)) <= max(map(len, asked))


class StartsAnew(VanillaTransformerForConditionalGeneration):
    """A model that changes the decoder's inputs in each step."""

    def prepare_inputs_for_generation(self, input_ids, **kwargs):
        inputs = super().prepare_inputs_for_generation(input_ids, **kwargs)
        return inputs | {"decoder_input_ids": torch.full_like(inputs["decoder_input_ids"], 7)}


@pytest.mark.parametrize("beams", [1, 3])
def test_inputs_of_a_subclass_are_asked_for(beams, caches, theirs):
    model = build("vanilla").double()
    model.__class__ = StartsAnew
    got = translate(model, num_beams=beams)
    assert caches == []
    theirs()
    assert torch.equal(got, translate(model, num_beams=beams))


def drop_rows(model, input_ids, **asked):
    """A loop that decodes one token for all rows, and then one token for every second row."""
    asked = {name: asked[name] for name in (CACHE_NAME, "encoder_outputs", "attention_mask")}
    for rows in (slice(None), slice(None, None, 2)):
        kept = torch.arange(len(input_ids))[rows]
        asked[CACHE_NAME].batch_select_indices(kept)
        asked["attention_mask"] = asked["attention_mask"][kept]
        asked["encoder_outputs"] = BaseModelOutput(asked["encoder_outputs"][0][kept])
        logits = model(decoder_input_ids=input_ids[kept][:, -1:], **asked).logits
        input_ids = torch.cat([input_ids[kept], logits[:, -1:].argmax(-1)], dim=1)
    return input_ids


def test_a_loop_of_the_caller_s_gets_an_ordinary_cache(theirs):
    model = build("vanilla").double()
    options = {"custom_generate": drop_rows, "logits_processor": [], "no_repeat_ngram_size": 0}
    got = translate(model, **options)
    assert got.shape == (SENTENCES // 2, 3)
    theirs()
    assert torch.equal(got, translate(model, **options))


def test_a_model_with_a_hook_is_called_for_each_token(caches):
    model = build("vanilla")
    calls = []
    model.register_forward_hook(lambda *args: calls.append(1))
    tokens = translate(model)
    assert len(caches) == 1
    assert len(calls) == tokens.shape[1] - 1


@pytest.mark.parametrize("count", [1, 4, 10])
@pytest.mark.parametrize("width", [7, 128, 1000, 50 * 64])
def test_the_best_are_those_of_topk(width, count):
    scores = torch.randn(5, max(width, count), generator=torch.Generator().manual_seed(width))
    scores[0, : width // 2] = -math.inf
    values, places = search.best(scores, count)
    expected = scores.topk(count)
    assert torch.equal(values, expected.values)
    assert torch.equal(scores.gather(1, places), values)
    assert torch.equal(places[1:], expected.indices[1:])


def test_processes_that_wait_for_each_other_go_on_together(monkeypatch):
    model = build("vanilla")
    asked = {}
    monkeypatch.setattr(type(model), "_sample", lambda self, input_ids, **given: asked.update(given) or input_ids)
    translate(model)
    asked = with_old_name(asked)
    assert search.can_search(**asked)
    assert not search.can_search(**asked | {"synced_gpus": True})


def test_transformers_loops_go_on_with_all_sentences():
    model = build("vanilla")
    out = translate(model, return_dict_in_generate=True, output_scores=True)
    assert all(len(scores) == SENTENCES for scores in out.scores)
    assert not isinstance(out.past_key_values, DecodingCache)


@pytest.mark.parametrize("beams", [1, 3])
def test_a_prefix_longer_than_the_model_takes_is_refused(beams):
    model = build(WITH_TWIN[0], max_position_embeddings=8)
    prefix = torch.full((1, 12), 5)
    with pytest.raises(ValueError, match=r"a sequence of \d+ tokens is longer than the model takes"):
        model.generate(torch.tensor([[5, 2]]), decoder_input_ids=prefix, num_beams=beams, max_length=20)
