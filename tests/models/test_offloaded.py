"""Models whose weights wait elsewhere, as `device_map="auto"` leaves them where a GPU is too small.

accelerate brings the weights of a module when the module is called. It also moves what the call is given. So a weight
is missing where it is read from outside its module. A list among the arguments is a copy, and a module among them is
moved. Here all weights wait, on a CPU, and the arguments of each layer are moved to it.
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
