"""Networks that combine the layers of a stack: iterative, hierarchical, and by EM routing.

Logits, generation, saving and back-ends are tested together with all other models (`model_cases.CASES`).
"""

import pytest
import torch
from model_cases import SIZES, build, new_vanilla, pair
from torch import nn

from hf_deepwide import VanillaTransformerConfig, VanillaTransformerForConditionalGeneration
from hf_deepwide.errors import UserError
from hf_deepwide.models.layer_aggregation import EMRouting

D, ENCODER, DECODER = 16, 24, 20  # the widths in SIZES; the encoder has 2 layers, the decoder 3


def network(inputs, width, d=D):
    """The parameters of two projections with biases. The first projection reads `inputs` vectors."""
    return (inputs * d + 1) * width + (width + 1) * d


def node(inputs, width, d=D):
    return network(inputs, width, d) + 2 * d


@pytest.mark.parametrize(
    ("how", "more"),
    [
        ("iterative", node(2, ENCODER) + 2 * node(2, DECODER)),
        ("hierarchical", node(2, ENCODER) + 2 * node(2, DECODER)),
        ("em_routing", sum(network(k, ENCODER) for k in (1, 2)) + sum(network(k, DECODER) for k in (1, 2, 3)) + 4 * D),
    ],
)
def test_each_stack_has_networks_of_its_own(how, more):
    plain, model = new_vanilla(), new_vanilla(layer_aggregation=how)
    assert model.num_parameters() - plain.num_parameters() == more


@pytest.mark.parametrize(
    ("how", "printed"), [("iterative", 31.5e6), ("hierarchical", 111.1e6 - 88.0e6), ("em_routing", 144.8e6 - 88.0e6)]
)
def test_six_layers_have_as_many_parameters_more_as_the_papers_print(how, printed):
    """Hierarchical: 23.1 M more; EM routing: 56.8 M, of which 0.1 M are not explained."""
    six = {"d_model": 512, "encoder_layers": 6, "decoder_layers": 6, "encoder_ffn_dim": 2048, "decoder_ffn_dim": 2048}
    with torch.device("meta"):
        plain, model = new_vanilla(**six), new_vanilla(**six, layer_aggregation=how)
    more = model.num_parameters() - plain.num_parameters()
    nodes = {
        "iterative": [2] * 5,
        "hierarchical": [2, 3, 3],
    }
    if how == "em_routing":
        assert more == 2 * (sum(network(k, 2048, 512) for k in range(1, 7)) + 2 * 512)
        assert more == pytest.approx(printed, abs=0.2e6)
    else:
        assert more == 2 * sum(node(inputs, 2048, 512) for inputs in nodes[how])
        assert more == pytest.approx(printed, abs=0.1e6)


def silence(model):
    """Make the networks of all nodes return 0."""
    for name, parameter in model.named_parameters():
        if ".network.fc2." in name:
            nn.init.zeros_(parameter)


def test_a_silent_tree_adds_layers_up_and_hands_them_on():
    """The encoder's output is LN(y_1 + y_2); the decoder's third layer reads LN(y_1 + y_2)."""
    model = build("vanilla-hierarchical")
    silence(model)
    read, given, outputs = {}, {}, {}
    for name in ("encoder", "decoder"):
        stack = getattr(model.model, name)
        for layer, module in enumerate(stack.layers, start=1):
            module.register_forward_pre_hook(lambda _, args, at=(name, layer): read.update({at: args[0]}))
            module.register_forward_hook(lambda _, args, output, at=(name, layer): given.update({at: output}))
        stack.layer_norm.register_forward_hook(lambda _, args, output, at=name: outputs.update({at: output}))
    with torch.no_grad():
        model(**pair())
        for name in ("encoder", "decoder"):
            first = getattr(model.model, name).combination.nodes[0].layer_norm(given[name, 1] + given[name, 2])
            torch.testing.assert_close(read[name, 2], given[name, 1])
            torch.testing.assert_close(outputs["encoder"] if name == "encoder" else read[name, 3], first)
        second = model.model.decoder.combination.nodes[1].layer_norm(first + given["decoder", 3])
        torch.testing.assert_close(outputs["decoder"], second)


def test_layers_below_an_iterative_chain_run_as_without():
    plain, model = build("vanilla-prenorm"), build("vanilla-prenorm", layer_aggregation="iterative")
    model.load_state_dict(plain.state_dict(), strict=False)
    with torch.no_grad():
        expected = plain(**pair(), output_hidden_states=True).encoder_hidden_states
        got = model(**pair(), output_hidden_states=True).encoder_hidden_states
    for layer in range(2):
        torch.testing.assert_close(got[layer], expected[layer])
    assert not torch.allclose(got[2], expected[2])


def test_capsules_give_what_equal_votes_agree_on():
    """All layers vote the same: each capsule's mean is the vote, and all capsules are equally active."""
    config = VanillaTransformerConfig(**SIZES, layer_aggregation="em_routing", routing_capsules=4)
    routing = EMRouting(config, 3, 8).double()
    vote = torch.randn(2, 5, 1, D, dtype=torch.float64)
    with torch.no_grad():
        routed = routing.route(vote.expand(-1, -1, 3, -1))
        shares = routing.expect(
            vote.unflatten(-1, (4, 4)),
            *routing.maximise(vote.unflatten(-1, (4, 4)), torch.full((2, 5, 1, 4), 0.25).log()),
        ).exp()
    ratio = routed / vote.squeeze(-2)
    assert (ratio > 0).all()
    assert (ratio <= 1).all()
    torch.testing.assert_close(ratio, ratio[..., :1].expand_as(ratio))
    torch.testing.assert_close(shares.sum(-1), torch.ones(2, 5, 1, dtype=torch.float64))


def test_a_vote_that_disagrees_counts_less():
    """Two layers agree with each other in the first capsule, and the third one is far away."""
    config = VanillaTransformerConfig(**SIZES, layer_aggregation="em_routing", routing_capsules=2)
    routing = EMRouting(config, 3, 8).double()
    votes = torch.zeros(1, 1, 3, D, dtype=torch.float64)
    votes[..., :2, : D // 2] = 1.0
    votes[..., 2, : D // 2] = -4.0
    votes[..., 0, D // 2 :] = 2.0
    with torch.no_grad():
        first = routing.route(votes)[0, 0, 0]
        routing.iterations = 1
        mean = routing.route(votes)[0, 0, 0]
    assert mean < 0 < first


def test_a_capsule_that_receives_nothing_is_finite():
    """The layers agree in the many features of the first capsule. In the second capsule their votes are random."""
    config = VanillaTransformerConfig(**{**SIZES, "d_model": 512}, layer_aggregation="em_routing", routing_capsules=2)
    routing = EMRouting(config, 3, 8)
    torch.manual_seed(0)
    votes = torch.cat([torch.ones(2, 3, 3, 256), 3 * torch.randn(2, 3, 3, 256)], dim=-1).requires_grad_()
    routed = routing.route(votes)
    routed.sum().backward()
    assert routed.isfinite().all()
    assert votes.grad.isfinite().all()


@pytest.mark.parametrize("how", ["iterative", "hierarchical", "em_routing"])
def test_a_stack_of_one_layer_works(how):
    model = new_vanilla(layer_aggregation=how, encoder_layers=1, decoder_layers=1)
    model(**pair()).loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_new_capsules_are_equal_and_do_not_decay():
    model = new_vanilla(layer_aggregation="em_routing")
    assert {"capsule_bias", "capsule_cost"} < set(model.no_weight_decay)
    routing = model.model.encoder.combination
    assert not routing.capsule_bias.any()
    assert not routing.capsule_cost.any()


@pytest.mark.parametrize("how", ["iterative", "hierarchical", "em_routing"])
def test_from_base_refuses_what_changes_the_function(how):
    with pytest.raises(UserError, match="`layer_aggregation` cannot be"):
        VanillaTransformerForConditionalGeneration.from_base(build("vanilla"), layer_aggregation=how)
    with pytest.raises(UserError, match=r"cannot start from .*`layer_aggregation` is"):
        VanillaTransformerForConditionalGeneration.from_base(build("vanilla", layer_aggregation=how))
