"""Quantised models: tools find linear layers by their type, and a model works with the replaced layers.

bitsandbytes, and PyTorch's own `quantize_dynamic`, look for modules whose type is exactly `nn.Linear`.
"""

import pytest
import torch
from model_cases import CASES, build, pair, source
from torch import nn

from hf_deepwide.models.branches import BranchSum, is_own
from hf_deepwide.models.dynamic_convolution import KernelPrediction


class Quantised(nn.Module):
    """The module by which a tool replaces a linear layer. It computes the same, but has no weight to read."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.compute = [linear]  # in a list, so that its parameters are not parameters of the model

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        (linear,) = self.compute
        return nn.functional.linear(x, linear.weight, linear.bias)


def quantise(model: nn.Module) -> list[str]:
    """Replace the linear layers, as tools do; return their names."""
    names = [name for name, module in model.named_modules() if type(module) is nn.Linear]
    for name in names:
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, Quantised(model.get_submodule(name)))
    return names


@pytest.mark.parametrize("case", CASES)
def test_a_quantised_model_computes_and_generates_as_before(case):
    model, batch = build(case).double(), pair()
    expected = model(**batch)
    options = {"num_beams": 3, "num_return_sequences": 2, "max_new_tokens": 6}
    translated = model.generate(**source(), **options)
    matrices = sum(weight.numel() for name, weight in model.named_parameters() if ".layers." in name)
    assert quantise(model)
    left = sum(weight.numel() for name, weight in model.named_parameters() if ".layers." in name)
    assert left < 0.6 * matrices  # only sums of several branches, norms and joints are left
    found = model(**batch)
    torch.testing.assert_close(found.logits, expected.logits, atol=1e-10, rtol=1e-10)
    torch.testing.assert_close(found.loss, expected.loss, atol=1e-10, rtol=1e-10)
    assert model.generate(**source(), **options).tolist() == translated.tolist()


@pytest.mark.parametrize("case", CASES)
def test_only_sums_of_several_branches_are_layers_of_our_own(case):
    model = build(case)
    own = [module for module in model.modules() if isinstance(module, nn.Linear) and type(module) is not nn.Linear]
    assert all(isinstance(module, BranchSum | KernelPrediction) for module in own)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_dynamic_quantisation_of_pytorch_takes_every_layer():
    model = build("vanilla")
    linears = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    quantised = torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)
    assert {type(quantised.get_submodule(name)) for name in linears} == {torch.ao.nn.quantized.dynamic.Linear}
    assert quantised.generate(**source(), max_new_tokens=4).shape == (3, 5)


def test_weights_of_another_kind_are_not_read_outside_their_module():
    """torchao keeps the class of a linear layer, and replaces the weight by another kind of tensor."""

    class Quantised(torch.Tensor):
        pass

    projection = torch.nn.Linear(2, 2)
    assert is_own(projection, torch.nn.Linear)
    projection.weight = torch.nn.Parameter(projection.weight.detach().as_subclass(Quantised), requires_grad=False)
    assert type(projection.weight) is Quantised
    assert not is_own(projection, torch.nn.Linear)
