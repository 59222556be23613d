"""Parts of latent depth: samples, priors and loss terms against numbers worked out by hand and naive arithmetic."""

import json
import math

import pytest
import torch

from hf_deepwide import LatentDepthConfig
from hf_deepwide.models import layer_selection
from hf_deepwide.models.layer_selection import (
    LayerSelection,
    bernoulli_kl,
    gumbel_difference,
    log_prior,
    sample_selection,
    sampled_kl,
    sharing_error,
    target_depth_error,
)

LOGITS = [[0.3, -1.2, 2.0, 0.0], [-0.7, 0.4, 3.1, -2.5], [1.0, 1.0, -6.0, 8.0]]  # three posteriors, four layers
Z = [[0.9, 0.2, 0.5, 0.7], [1.0, 0.0, 1.0, 0.0], [0.1, 0.6, 0.3, 1.0]]


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


def double(rows):
    return torch.tensor(rows, dtype=torch.float64)


def selection_of(logits=LOGITS, stack="decoder", **fields):
    """A `LayerSelection` with these logits."""
    fields = {"num_posteriors": len(logits), f"{stack}_layers": len(logits[0]), **fields}
    selection = LayerSelection(LatentDepthConfig(**fields), stack).double()
    with torch.no_grad():
        selection.layer_logits.copy_(double(logits))
    return selection


# Samples


def test_samples_worked_out_by_hand():
    """The expected numbers were computed without this library, as in the other tests by hand."""
    logits, noise = double([0.0, 1.0, -1.0]), double([0.5, -1.2, 0.2])
    soft = sample_selection(logits, noise, 5.0)
    assert soft.tolist() == pytest.approx([0.524979, 0.490001, 0.460085], abs=1e-6)
    assert sample_selection(logits, noise, 5.0, hard=True).tolist() == [1, 0, 0]


def test_the_two_way_softmax_of_eq_5_is_the_sigmoid():
    """For 200 random alpha(0), alpha(1), eps(0), eps(1) and temperatures."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(200):
        a0, a1, e0, e1 = (3 * torch.randn(4, generator=generator, dtype=torch.float64)).tolist()
        tau = 0.1 + 6 * torch.rand(1, generator=generator).item()
        weights = [math.exp((a + e) / tau) for a, e in ((a0, e0), (a1, e1))]
        got = sample_selection(double([a1 - a0]), double([e1 - e0]), tau).item()
        assert got == pytest.approx(weights[1] / sum(weights), rel=1e-10)


@pytest.mark.parametrize("temperature", [0.5, 5.0])
def test_hard_samples_have_the_gradient_of_soft_ones(temperature):
    """Values are 0 and 1 exactly; the gradient is sigma'(s) / tau with s = (a + noise) / tau."""
    logits = double(LOGITS).requires_grad_()
    noise = gumbel_difference(logits)
    z = sample_selection(logits, noise, temperature, hard=True)
    assert set(z.flatten().tolist()) == {0.0, 1.0}
    direction = torch.arange(12.0, dtype=torch.float64).view(3, 4)
    (z * direction).sum().backward()
    for n, row in enumerate(LOGITS):
        for layer, a in enumerate(row):
            s = sigmoid((a + noise[n, layer].item()) / temperature)
            expected = direction[n, layer].item() * s * (1 - s) / temperature
            assert logits.grad[n, layer].item() == pytest.approx(expected, rel=1e-10)


@pytest.mark.parametrize("temperature", [0.3, 5.0])
def test_hard_samples_select_with_probability_q_whatever_the_temperature(temperature):
    """Soft samples at tau 5 and a = 0 have the standard deviation 0.087."""
    torch.manual_seed(0)
    logits = torch.tensor([-2.0, -0.5, 0.0, 1.0, 3.0]).expand(10_000, 5)
    noise = gumbel_difference(logits)
    frequencies = sample_selection(logits, noise, temperature, hard=True).mean(0)
    assert frequencies.tolist() == pytest.approx([sigmoid(a) for a in (-2, -0.5, 0, 1, 3)], abs=0.02)
    soft = sample_selection(logits, noise, 5.0)[:, 2]
    assert soft.mean().item() == pytest.approx(0.5, abs=0.003)
    assert soft.std().item() == pytest.approx(0.087, abs=0.003)


def test_noise_is_the_difference_of_two_gumbel_variables():
    """The difference is logistic: its distribution function is the sigmoid."""
    torch.manual_seed(1)
    noise = gumbel_difference(torch.zeros(20_000))
    for x in (-3.0, -1.0, 0.0, 0.7, 2.0):
        assert (noise <= x).float().mean().item() == pytest.approx(sigmoid(x), abs=0.01)


# KL and priors


@pytest.mark.parametrize(
    ("q", "p", "expected"), [(sigmoid(1), 0.5, 0.110944), (0.9, 0.6, 0.226289), (0.2, 0.6, 0.334795)]
)
def test_analytic_divergences_worked_out_by_hand(q, p, expected):
    logit = double([[math.log(q / (1 - q))]])
    got = bernoulli_kl(logit, *log_prior(logit, "beta", p, 1 - p))
    assert got.item() == pytest.approx(expected, abs=1e-6)


def beta(prior, **fields):
    """The config fields of a prior. Only a Beta prior accepts `fields`."""
    return {"layer_prior": prior, **(fields if prior == "beta" else {})}


def naive_prior(prior, layer, a=1.0, b=1.0):
    if prior == "aggregated":
        return sum(sigmoid(row[layer]) for row in LOGITS) / len(LOGITS)
    return {"uniform": 0.5, "beta": a / (a + b)}[prior]


@pytest.mark.parametrize("reduction", ["sum", "mean"])
@pytest.mark.parametrize("prior", ["uniform", "beta", "aggregated"])
def test_divergence_and_its_gradient_against_naive_arithmetic(prior, reduction):
    """Eq. 4 and 7, one layer and posterior at a time. No gradient passes through the aggregated posterior."""
    selection = selection_of(**beta(prior, prior_select=3.0, prior_skip=2.0), kl_reduction=reduction)
    total, gradient = 0.0, []
    for row in LOGITS:
        gradient.append([])
        for layer, a in enumerate(row):
            q, p = sigmoid(a), naive_prior(prior, layer, 3.0, 2.0)
            total += q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p))
            gradient[-1].append(q * (1 - q) * (math.log(q / p) - math.log((1 - q) / (1 - p))))
    scale = len(LOGITS) * (len(LOGITS[0]) if reduction == "mean" else 1)
    divergence = selection.divergence()
    divergence.backward()
    assert divergence.item() == pytest.approx(total / scale, rel=1e-9)
    torch.testing.assert_close(selection.layer_logits.grad, double(gradient) / scale, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("prior", ["uniform", "aggregated"])
def test_divergences_of_certain_posteriors_are_finite(prior):
    """q is 0 or 1 in float32."""
    selection = selection_of([[60.0, -60.0, 200.0], [-60.0, -60.0, 200.0]], layer_prior=prior).float()
    divergence = selection.divergence()
    divergence.backward()
    assert divergence.item() == pytest.approx((math.log(2) * (3 if prior == "uniform" else 1)), rel=1e-5)
    assert torch.isfinite(selection.layer_logits.grad).all()


def test_the_released_codes_divergence():
    """V3 at full weight, and the aggregated prior, which is a distribution over layers."""
    z = double([1.0, 0.0, 1.0, 0.0]).requires_grad_()
    loss = 0.1 * sampled_kl(z, double([0.5] * 4)).mean()
    loss.backward()
    assert loss.item() == pytest.approx(0.0346574, abs=1e-7)
    assert z.grad.tolist() == pytest.approx([0.0423287, -0.3856237, 0.0423287, -0.3856237], abs=1e-6)
    rows = double([[1, 0, 1, 0], [1, 1, 1, 1]])
    prior = rows.sum(0) / rows.sum()
    assert prior.tolist() == pytest.approx([1 / 3, 1 / 6, 1 / 3, 1 / 6])
    assert 0.1 * sampled_kl(rows, prior)[0].mean().item() == pytest.approx(0.0549, abs=5e-5)


@pytest.mark.parametrize("prior", ["uniform", "beta", "aggregated"])
def test_the_released_divergence_of_the_samples_in_use(prior):
    selection = selection_of(kl_estimator="fairseq", kl_reduction="mean", **beta(prior, prior_select=3.0))
    selection.train()(torch.tensor([0, 1]), 2)
    z = selection.sample().tolist()
    total = sum(map(sum, z))
    expected = 0.0
    for row in z:
        for layer, weight in enumerate(row):
            p = {"uniform": 0.5, "beta": 0.75, "aggregated": sum(other[layer] for other in z) / total}[prior]
            expected += weight * (math.log(weight + 1e-7) - math.log(p)) / 12
    assert selection.divergence().item() == pytest.approx(expected, rel=1e-9)


def test_the_released_divergence_is_finite_where_all_layers_are_skipped():
    selection = selection_of(
        [[-50.0, -50.0]], kl_estimator="fairseq", layer_prior="aggregated", soft_selection_steps=0
    )
    selection.training_step = 1
    selection.train()(None, 2)
    divergence = selection.divergence()
    divergence.backward()
    assert divergence.item() == 0
    assert torch.isfinite(selection.layer_logits.grad).all()


# Target depth


def test_target_depth_worked_out_by_hand():
    """24 layers, one language that uses all and one that uses none; the sharing term is 24 * ln(2) / 2."""
    utilization = torch.stack([torch.ones(24), torch.zeros(24)]).mean(0)
    assert target_depth_error(utilization, 12).item() == 0
    assert sharing_error(utilization).item() == pytest.approx(8.3178, abs=1e-4)


@pytest.mark.parametrize(("norm", "power"), [("squared", 2), ("absolute", 1)])
def test_target_depth_against_naive_arithmetic(norm, power):
    u = [sum(column) / 3 for column in zip(*Z, strict=True)]
    got = target_depth_error(double(Z).mean(0), 3.5, norm).item()
    assert got == pytest.approx(abs(sum(u) - 3.5) ** power, rel=1e-12)
    assert sharing_error(double(Z).mean(0)).item() == pytest.approx(-sum(x * math.log(x) for x in u), rel=1e-12)


def test_the_sharing_term_has_a_gradient_where_no_language_uses_a_layer():
    u = torch.tensor([0.0, 0.5, 1.0], requires_grad=True)
    sharing_error(u).backward()
    assert torch.isfinite(u.grad).all()


# Schedules


def test_annealing_starts_from_zero_and_is_never_negative():
    """R8: beta * clip((t - t0) / anneal, 0, 1). V3's numbers; 0 at t < 500, where the released code is negative."""
    config = LatentDepthConfig(kl_weight=0.1, soft_selection_steps=500, kl_anneal_steps=5000)
    full = 0.0346574
    at = {step: full * config.kl_annealing_at(step) for step in (0, 250, 500, 3000, 5500, 99999)}
    assert at == pytest.approx({0: 0, 250: 0, 500: 0, 3000: 0.0173287, 5500: full, 99999: full}, abs=1e-7)


def test_the_target_depth_follows_when_the_divergence_has_its_weight():
    target = {"target_encoder_layers": 3}
    config = LatentDepthConfig(soft_selection_steps=10, kl_anneal_steps=20, target_depth_anneal_steps=40, **target)
    assert [config.target_depth_annealing_at(t) for t in (0, 30, 40, 50, 70, 71)] == [0, 0, 0.25, 0.5, 1, 1]
    assert [config.kl_annealing_at(t) for t in (0, 10, 15, 30, 40)] == [0, 0, 0.25, 1, 1]
    at_once = LatentDepthConfig(kl_anneal_steps=0, target_depth_anneal_steps=0, **target)
    assert at_once.kl_annealing_at(0) == at_once.target_depth_annealing_at(0) == 1


def test_temperature_and_hard_selection_follow_the_steps():
    config = LatentDepthConfig(
        gumbel_temperature=8, final_temperature=0.5, temperature_anneal_steps=4, soft_selection_steps=3
    )
    assert [config.temperature_at(t) for t in (0, 1, 2, 4, 9)] == pytest.approx([8, 4, 2, 0.5, 0.5])
    assert [config.selects_hard_at(t) for t in (0, 3, 4)] == [False, False, True]
    assert LatentDepthConfig().temperature_at(10**6) == 5
    assert not LatentDepthConfig().selects_hard_at(10**6)

    selection = selection_of([[0.5, -0.5]], gumbel_temperature=8, final_temperature=0.5, temperature_anneal_steps=4)
    for step, tau in ((0, 8), (2, 2), (9, 0.5)):
        selection.training_step = step
        gates = selection.train()(None, 1)
        expected = [sigmoid((a + e) / tau) for a, e in zip((0.5, -0.5), selection.noise[0].tolist(), strict=True)]
        assert [gate.item() for gate in gates] == pytest.approx(expected, rel=1e-9)


# The selection of each layer in a forward pass


def test_one_sample_a_posterior_and_forward_pass():
    selection = selection_of().train()
    torch.manual_seed(3)
    first = torch.stack(selection(torch.tensor([2, 0, 2, 1]), 4))
    assert first.shape == (4, 4, 1, 1)  # layer, sentence
    assert torch.equal(first[:, 0], first[:, 2])
    assert torch.equal(first[:, :, 0, 0], selection.sample()[[2, 0, 2, 1]].t())
    assert not torch.equal(first[:, 0], first[:, 1])
    assert not torch.equal(first, torch.stack(selection(torch.tensor([2, 0, 2, 1]), 4)))


def test_evaluation_is_the_same_every_time_and_skips_what_no_sentence_uses():
    """The rows of LOGITS select layers 0, 2, 3 (a logit of 0 selects the layer), then 1, 2, then 0, 1, 3."""
    selection = selection_of(inference_selection="hard").eval()
    assert selection.chosen.tolist() == [
        [True, False, True, True],
        [False, True, True, False],
        [True, True, False, True],
    ]
    assert selection(torch.tensor([0, 0]), 2) == [True, False, True, True]
    mixed = selection(torch.tensor([0, 1]), 2)
    assert mixed[2] is True
    assert [gate.flatten().tolist() for gate in (mixed[0], mixed[1], mixed[3])] == [[1, 0], [0, 1], [1, 0]]
    weighed = selection(torch.tensor([0, 0]), 2, may_skip=False)
    assert torch.stack(weighed)[:, 0].flatten().tolist() == [1, 0, 1, 1]


@pytest.mark.parametrize(("how", "temperature"), [("soft", 1.0), ("tempered", 4.0)])
def test_soft_evaluation(how, temperature):
    selection = selection_of(inference_selection=how, gumbel_temperature=9.0, final_temperature=4.0).eval()
    gates = torch.stack(selection(torch.tensor([1]), 1)).flatten().tolist()
    assert gates == pytest.approx([sigmoid(a / temperature) for a in LOGITS[1]], rel=1e-12)


@pytest.mark.parametrize(
    ("fields", "selection"),
    [
        ({}, "tempered"),
        ({"final_temperature": 1.0}, "tempered"),
        ({"final_temperature": 0.5, "temperature_anneal_steps": 100}, "hard"),
        ({"gumbel_temperature": 0.9}, "hard"),
        ({"gumbel_temperature": 0.9, "final_temperature": 2}, "tempered"),
        ({"soft_selection_steps": 0}, "hard"),
        ({"soft_selection_steps": 500, "inference_selection": "soft"}, "soft"),
        ({"inference_selection": "hard"}, "hard"),
    ],
)
def test_evaluation_is_by_default_what_training_ends_with(fields, selection, tmp_path):
    config = LatentDepthConfig(**fields)
    assert config.inference_selection == selection
    config.save_pretrained(tmp_path)
    again = LatentDepthConfig.from_pretrained(tmp_path, final_temperature=3.0)
    assert again.inference_selection == selection, "what a checkpoint says holds, whatever is changed beside it"


def test_soft_samples_are_evaluated_about_their_mean():
    """At tau 5 z is near 1/2 whatever the sign of a logit. So is z in evaluation: no layer is fully in or out."""
    selection = selection_of([[0.4, -0.4, -2.0]])
    torch.manual_seed(0)
    samples = torch.stack([torch.stack(selection.train()(None, 1)) for _ in range(4000)])
    evaluated = torch.stack(selection.eval()(None, 1))
    torch.testing.assert_close(evaluated, samples.mean(0), atol=0.02, rtol=0)


@pytest.mark.parametrize("posteriors", [[0, 0], [0, 1]], ids=["of no sentence", "of one of two"])
def test_an_evaluation_without_a_layer_says_so_once(posteriors, monkeypatch):
    warnings = []
    monkeypatch.setattr(layer_selection.logger, "warning_once", warnings.append)
    fields = {"num_posteriors": 2, "inference_selection": "hard", "stack": "encoder"}
    selection_of([[1.0, 1.0], [1.0, -1.0]], **fields).eval()(torch.tensor(posteriors), 2)
    assert warnings == []
    selection_of([[-1.0, -1.0], [1.0, -1.0]], **fields).eval()(torch.tensor(posteriors), 2)
    assert ["encoder" in warning and "tempered" in warning for warning in warnings] == [True]
    selection_of([[-1.0, -1.0], [1.0, -1.0]], **{**fields, "inference_selection": "soft"}).eval()(
        torch.tensor(posteriors), 2
    )
    assert len(warnings) == 1


def test_missing_or_misshapen_posteriors_are_explained():
    selection = selection_of(posterior_names=["de", "fr", "cs"]).eval()
    with pytest.raises(ValueError, match=r"3 posteriors \(de, fr, cs\).*`posteriors`.*0 to 2"):
        selection(None, 5)
    with pytest.raises(ValueError, match=r"5 sentences.*`\[5\]`.*\[2\]"):
        selection(torch.tensor([0, 1]), 5)
    for wrong, word in (([0, 1], "list"), ("de", "str"), (torch.tensor([0.0, 1.0]), "float32")):
        with pytest.raises(ValueError, match=rf"LongTensor.*{word}"):
            selection(wrong, 2)
    for wrong in (-1, 3):  # as an index, -1 would be the last posterior
        with pytest.raises(ValueError, match=rf"from 0 to 2, got .*{wrong}"):
            selection(torch.tensor([1, wrong]), 2)


# Configuration


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"normalize_before": False}, ["`normalize_before`", "True", "got False"]),
        ({"latent_encoder": False, "latent_decoder": False}, ["`latent_encoder`", "`latent_decoder`", "True"]),
        ({"target_encoder_layers": 7}, ["`target_encoder_layers`", "[0, 6]", "got 7"]),
        ({"target_decoder_layers": 3, "latent_decoder": False}, ["`target_decoder_layers`", "None", "got 3"]),
        ({"num_posteriors": 0}, ["`num_posteriors`", "at least 1", "got 0"]),
        ({"num_posteriors": 2, "posterior_names": ["de"]}, ["`posterior_names`", "2", "['de']"]),
        ({"num_posteriors": 2, "posterior_names": ["de", "de"]}, ["`posterior_names`", "another name", "'de', 'de'"]),
        ({"gumbel_temperature": 0}, ["`gumbel_temperature`", "above 0", "got 0"]),
        ({"final_temperature": -1.0}, ["`final_temperature`", "above 0", "got -1.0"]),
        ({"prior_skip": 0.0}, ["`prior_skip`", "above 0", "got 0.0"]),
        ({"kl_weight": -0.1}, ["`kl_weight`", "at least 0", "got -0.1"]),
        ({"kl_anneal_steps": -1}, ["`kl_anneal_steps`", "at least 0", "got -1"]),
        ({"soft_selection_steps": -1}, ["`soft_selection_steps`", "at least 0", "got -1"]),
        ({"layer_prior": "beta(1,1)"}, ["`layer_prior`", "uniform, beta, aggregated", "'beta(1,1)'"]),
        ({"kl_estimator": "exact"}, ["`kl_estimator`", "analytic, fairseq", "'exact'"]),
        ({"kl_reduction": "max"}, ["`kl_reduction`", "sum, mean", "'max'"]),
        ({"target_depth_norm": "l2"}, ["`target_depth_norm`", "squared, absolute", "'l2'"]),
        ({"inference_selection": "sample"}, ["`inference_selection`", "hard, soft, tempered", "'sample'"]),
        ({"prior_select": 2.0}, ["`prior_select` is 2.0", "'uniform'", "`layer_prior='beta'`, or `prior_select=1.0`"]),
        ({"layer_prior": "aggregated", "prior_skip": 2.0}, ["`prior_skip` is 2.0", "'aggregated'"]),
        ({"layer_sharing_weight": 0.1}, ["`layer_sharing_weight` is 0.1", "`target_encoder_layers`"]),
        ({"target_depth_weight": 50}, ["`target_depth_weight` is 50", "`target_depth_weight=0.1`"]),
        ({"target_depth_norm": "absolute"}, ["`target_depth_norm` is 'absolute'", "`target_decoder_layers`"]),
        ({"temperature_anneal_steps": 9}, ["`temperature_anneal_steps` is 9", "set `final_temperature`"]),
    ],
    ids=lambda value: json.dumps(value) if isinstance(value, dict) else "",
)
def test_a_wrong_field_is_named_with_its_value_and_what_is_accepted(fields, words):
    with pytest.raises(ValueError, match=r"^LatentDepthConfig") as error:
        LatentDepthConfig(**fields)
    for word in words:
        assert word in str(error.value)
