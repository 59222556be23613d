"""Latent depth in evaluation: deterministic, the same with every cache; layers that are not used are not computed."""

import pytest
import torch
from model_cases import SIZES, pair, scramble, source
from naive_transformer import logits as naive_logits
from naive_transformer import selections

from hf_deepwide import LatentDepthConfig, LatentDepthForConditionalGeneration

CLOSE = {"atol": 2e-5, "rtol": 2e-5}
NEW = 6
# which layers of the encoder (2) and the decoder (3) are used
USED = {
    "all": ("11", "111"),
    "not the first": ("01", "011"),
    "not the last": ("10", "110"),
    "the middle one": ("01", "010"),
    "none": ("00", "000"),
}
EVERY = pytest.mark.parametrize("used", USED.values(), ids=USED)
SOFT = pytest.mark.parametrize("selection", ["hard", "soft", "tempered"])
WAYS = {**{name: (patterns, "hard") for name, patterns in USED.items()}, "soft": (USED["the middle one"], "soft")}
POSTERIORS = torch.tensor([1, 0, 2])


def latent(used=(), **fields):
    """A scrambled model in evaluation mode. For each stack, `used` has one pattern, or one for each posterior."""
    fields = {**SIZES, "inference_selection": "hard", **fields}
    model = scramble(LatentDepthForConditionalGeneration(LatentDepthConfig(**fields))).eval()
    for stack, patterns in zip(("encoder", "decoder"), used, strict=False):
        selection = model.layer_selections.get(stack)
        if selection is None:
            continue
        rows = [patterns] if isinstance(patterns, str) else patterns
        signs = torch.tensor([[1.0 if digit == "1" else -1.0 for digit in row] for row in rows])
        with torch.no_grad():
            selection.layer_logits.copy_(signs * (0.5 + selection.layer_logits.abs()))
    model.generation_config.eos_token_id = None
    return model


def three(**fields):
    """A model of three posteriors. One of them uses the decoder's first layer, and none uses its last layer."""
    return latent((["11", "01", "10"], ["010", "110", "010"]), num_posteriors=3, **fields)


def generate(model, inputs=None, **options):
    options = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False, "no_repeat_ngram_size": 1, **options}
    return model.generate(**(source() if inputs is None else inputs), **options)


def calls(model):
    """How often each layer runs from now on, by name."""
    counts = {}
    for stack in ("encoder", "decoder"):
        for index, layer in enumerate(model.get_submodule(f"model.{stack}").layers):
            counts[f"{stack}{index}"] = 0

            def count(*_, name=f"{stack}{index}"):
                counts[name] += 1

            layer.register_forward_hook(count)
    return counts


@pytest.mark.parametrize(("used", "selection"), WAYS.values(), ids=WAYS)
def test_evaluation_is_the_equations_and_the_same_every_time(used, selection):
    """Logits and loss do not change between calls."""
    model = latent(used, inference_selection=selection).double()
    batch = pair((4, 3), (3, 2))
    with torch.no_grad():
        first = model(**batch)
        again = model(**batch)
    assert torch.equal(first.logits, again.logits)
    assert torch.equal(first.loss, again.loss)
    weights = {name.removeprefix("model."): tensor for name, tensor in model.state_dict().items()}
    for row in range(2):
        ids = batch["input_ids"][row][batch["attention_mask"][row] == 1].tolist()
        target = [2, *batch["labels"][row][batch["labels"][row] != -100].tolist()[:-1]]
        expected = naive_logits(weights, model.config, ids, target)
        torch.testing.assert_close(first.logits[row, : len(target)], expected, atol=1e-10, rtol=1e-10)


@SOFT
def test_each_sentence_is_computed_by_its_own_posterior(selection):
    """A batch of three languages against the equations, one sentence and posterior at a time."""
    model = three(inference_selection=selection).double()
    batch = pair((4, 3, 3), (3, 2, 2))
    with torch.no_grad():
        got = model(**batch, posteriors=POSTERIORS).logits
    weights = {name.removeprefix("model."): tensor for name, tensor in model.state_dict().items()}
    for row, posterior in enumerate(POSTERIORS.tolist()):
        ids = batch["input_ids"][row][batch["attention_mask"][row] == 1].tolist()
        target = [2, *batch["labels"][row][batch["labels"][row] != -100].tolist()[:-1]]
        z = selections(weights, model.config, posterior)
        expected = naive_logits(weights | z, model.config, ids, target)
        torch.testing.assert_close(got[row, : len(target)], expected, atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("cache", [{"use_cache": False}, {"cache_implementation": "static", "disable_compile": True}])
@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize(("used", "selection"), WAYS.values(), ids=WAYS)
def test_generation_is_the_same_with_every_cache_and_every_time(used, selection, beams, cache):
    """Translations do not change between calls or caches."""
    model = latent(used, inference_selection=selection)
    more = {"num_beams": beams, "return_dict_in_generate": True, "output_logits": True}
    expected, again, got = generate(model, **more), generate(model, **more), generate(model, **more, **cache)
    assert torch.equal(again.sequences, expected.sequences)
    assert torch.equal(torch.stack(again.logits), torch.stack(expected.logits))
    assert torch.equal(got.sequences, expected.sequences)
    torch.testing.assert_close(torch.stack(got.logits), torch.stack(expected.logits), **CLOSE)


@pytest.mark.parametrize("beams", [1, 3])
@SOFT
def test_languages_are_translated_alike_together_and_alone(selection, beams):
    """`generate` passes the posteriors to the encoder and, repeated for each beam, to the decoder."""
    model = three(inference_selection=selection)
    more = {"num_beams": beams, "return_dict_in_generate": True, "output_logits": True}
    together = generate(model, {**source(), "posteriors": POSTERIORS}, **more)
    same = generate(model, {**source(), "posteriors": torch.tensor([0, 0, 0])}, **more)
    assert not torch.equal(same.sequences, together.sequences)
    for row in range(3):
        inputs = {name: tensor[row : row + 1] for name, tensor in source().items()}
        alone = generate(model, {**inputs, "posteriors": POSTERIORS[row : row + 1]}, **more)
        assert torch.equal(alone.sequences[0], together.sequences[row])
        here = slice(row * beams, (row + 1) * beams)
        torch.testing.assert_close(
            torch.cat(alone.logits), torch.stack(together.logits)[:, here].flatten(0, 1), **CLOSE
        )
    static = generate(
        model, {**source(), "posteriors": POSTERIORS}, **more, cache_implementation="static", disable_compile=True
    )
    assert torch.equal(static.sequences, together.sequences)


@EVERY
def test_unused_layers_are_not_computed(used):
    model = latent(used)
    counts = calls(model)
    out = generate(model, return_dict_in_generate=True)
    expected = {f"encoder{i}": int(digit) for i, digit in enumerate(used[0])}
    expected |= {f"decoder{i}": NEW * int(digit) for i, digit in enumerate(used[1])}
    assert counts == expected
    heads = SIZES["decoder_attention_heads"]
    own, cross = out.past_key_values.self_attention_cache, out.past_key_values.cross_attention_cache
    for index, digit in enumerate(used[1]):
        if digit == "1":
            assert own.layers[index].keys.shape == (3, heads, NEW, 16 // heads)
            assert cross.layers[index].keys.shape == (3, heads, 7, 16 // heads)
        elif index == 0:  # the first layer's slot gives the length
            assert own.layers[0].keys.shape == (3, 1, NEW, 1)
        else:
            assert index >= len(own.layers) or not own.layers[index].is_initialized
            assert index >= len(cross.layers) or not cross.layers[index].is_initialized


def test_a_layer_is_computed_where_one_sentence_of_the_batch_uses_it():
    model = three()
    counts = calls(model)
    with torch.no_grad():
        model(**pair(), posteriors=POSTERIORS)
    assert counts == {"encoder0": 1, "encoder1": 1, "decoder0": 1, "decoder1": 1, "decoder2": 0}
    with torch.no_grad():
        model(**pair(), posteriors=torch.tensor([2, 2, 2]))
    assert counts == {"encoder0": 2, "encoder1": 1, "decoder0": 1, "decoder1": 2, "decoder2": 0}


def test_training_computes_every_layer():
    """Also layers that a hard sample skips: their logits learn from the output that they would have added."""
    model = latent(("00", "000"), soft_selection_steps=0).train()
    model.training_step = 1
    counts = calls(model)
    model(**pair()).loss.backward()
    assert set(counts.values()) == {1}
    for selection in model.layer_selections.values():
        assert (selection.layer_logits.grad != 0).all()


def test_states_of_all_layers_are_there_when_asked_for():
    model = latent(("01", "010"), attn_implementation="eager")
    with torch.no_grad():
        plain = model(**pair())
        out = model(**pair(), output_hidden_states=True, output_attentions=True)
    assert [len(out[name]) for name in ("encoder_hidden_states", "decoder_hidden_states")] == [3, 4]
    assert [len(out[name]) for name in ("encoder_attentions", "decoder_attentions", "cross_attentions")] == [2, 3, 3]
    assert torch.equal(out.encoder_hidden_states[0], out.encoder_hidden_states[1])  # z = 0
    torch.testing.assert_close(out.logits, plain.logits, **CLOSE)


def test_generation_continues_from_a_cache_without_its_first_layer():
    model = latent(("11", "010"))
    whole = generate(model)
    first = generate(model, max_new_tokens=3, min_new_tokens=3, return_dict_in_generate=True)
    inputs = {
        **source(),
        "decoder_input_ids": first.sequences,
        "decoder_attention_mask": torch.ones_like(first.sequences),
        "past_key_values": first.past_key_values,
    }
    assert torch.equal(generate(model, inputs, max_new_tokens=3, min_new_tokens=3), whole)


def test_missing_posteriors_are_explained_by_the_model_and_by_generate():
    model = three(posterior_names=["de", "fr", "cs"])
    for call in (lambda: model(**pair()), lambda: generate(model)):
        with pytest.raises(ValueError, match=r"3 posteriors \(de, fr, cs\): pass `posteriors`"):
            call()
    with pytest.raises(ValueError, match="posterior_"):
        generate(model, posterior_=POSTERIORS)


def test_posteriors_make_no_difference_where_there_is_one():
    model = latent(("10", "011"))
    with torch.no_grad():
        expected = model(**pair()).logits
        assert torch.equal(model(**pair(), posteriors=torch.zeros(3, dtype=torch.long)).logits, expected)


@pytest.mark.parametrize("stack", ["encoder", "decoder"])
def test_selects_no_layers_of_a_static_stack(stack):
    model = three(**{f"latent_{stack}": False})
    assert list(model.layer_selections) == [{"encoder": "decoder", "decoder": "encoder"}[stack]]
    counts = calls(model)
    with torch.no_grad():
        model(**pair(), posteriors=POSTERIORS)
    assert all(count == 1 for name, count in counts.items() if name.startswith(stack))
    model.train()(**pair(), posteriors=POSTERIORS).loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
