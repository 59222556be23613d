"""`torch.export`, which ONNX export uses: one graph serves every batch size and length.

The tests of ONNX export trace more, but with a cache. Here whole targets and the selection of layers are traced.
"""

import pytest
import torch
from model_cases import build, source, tokens
from torch import nn
from torch.export import Dim, export

CASES = {
    "mat": ("mat-3", {}),
    "latent, tempered": ("latent-both", {"inference_selection": "tempered"}),
    "latent, two posteriors": ("latent-both", {"num_posteriors": 2, "inference_selection": "hard"}),
    "lstm": ("lstm-two", {}),
}
BATCH, SOURCE, TARGET = Dim("batch", max=64), Dim("source", min=2, max=40), Dim("target", min=2, max=40)


class Logits(nn.Module):
    """The exported module: encoder, decoder and head. It has positional inputs and returns only the logits."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, ids, mask, target, posteriors):
        extra = {} if posteriors is None else {"posteriors": posteriors}
        return self.model(ids, mask, target, use_cache=False, **extra).logits


def batch(lengths, several):
    """Inputs of `Logits.forward` for sentences of these lengths."""
    posteriors = torch.arange(len(lengths)) % 2 if several else None
    return *source(lengths).values(), tokens(lengths[::-1])[0], posteriors


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_an_exported_graph_serves_every_batch_size_and_length(case):
    name, fields = CASES[case]
    several = "num_posteriors" in fields
    model = Logits(build(name, encoder_layers=1, decoder_layers=1, **fields))
    shapes = {0: BATCH, 1: SOURCE}, {0: BATCH, 1: SOURCE}, {0: BATCH, 1: TARGET}, {0: BATCH} if several else None
    graph = export(model, batch((7, 4, 5), several), dynamic_shapes=shapes).module()
    for lengths in ((9, 3), (5, 6, 2, 8, 3), (4,)):
        inputs = batch(lengths, several)
        torch.testing.assert_close(graph(*inputs), model(*inputs), rtol=1e-4, atol=1e-5)
