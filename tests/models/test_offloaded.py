"""Models with offloaded weights, as `device_map="auto"` makes them where a GPU is too small.

accelerate loads the weights of a module when the module is called, and moves the arguments of the call. So code that
reads a weight from outside its module finds no weight. A list among the arguments is replaced by a copy, and a module
among them is moved. Here all weights are offloaded to a CPU, and the arguments of each layer are moved to it.
"""

import copy

import pytest
import torch
from accelerate import cpu_offload
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from model_cases import CASES, build, pair, source


@pytest.mark.parametrize("case", CASES)
def test_weights_that_wait_compute_the_same(case):
    model = build(case)
    offloaded = cpu_offload(copy.deepcopy(model), torch.device("cpu"))
    for layer in (*offloaded.model.encoder.layers, *offloaded.model.decoder.layers):
        if not hasattr(layer, "_hf_hook"):  # it has no weights of its own
            add_hook_to_module(layer, AlignDevicesHook(torch.device("cpu")))
    assert next(offloaded.model.encoder.layers.parameters()).is_meta
    with torch.no_grad():
        for skip_logits in (False, True):
            expected, found = (m(**pair(), skip_logits=skip_logits) for m in (model, offloaded))
            torch.testing.assert_close(found.loss, expected.loss)
            if not skip_logits:
                torch.testing.assert_close(found.logits, expected.logits)
    for beams in (1, 2):
        expected, found = (
            m.generate(**source(), num_beams=beams, do_sample=False, max_new_tokens=3) for m in (model, offloaded)
        )
        assert found.tolist() == expected.tolist()
