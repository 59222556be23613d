"""Kinds of operations in a training step."""

from types import SimpleNamespace

import pytest
import step_parts
from step_parts import LOSS, REST, kind_of


def nested(*names, shapes=()):
    """An operation inside its parents: `names` begin with the innermost operation, whose inputs have `shapes`."""
    event = None
    for name in reversed(names):
        event = SimpleNamespace(name=name, cpu_parent=event, input_shapes=[])
    event.input_shapes = list(shapes)
    return event


@pytest.mark.parametrize(
    ("names", "shapes", "kind"),
    [
        (["aten::addmm", "aten::linear"], [[16, 8], [8, 8]], "matrix products"),
        (["aten::addmm", "aten::linear"], [[16, 8], [8, 99]], LOSS),
        (["aten::mm", "LinearCrossEntropy"], [[16, 8], [8, 8]], LOSS),
        (["aten::bmm", "aten::matmul"], [[16, 8, 8], [16, 8, 8]], "attention"),
        (["aten::copy_", "aten::_to_copy", "aten::linear"], [[16, 8]], "casts"),
        (["aten::mul", "aten::_foreach_mul_", "Optimizer.step#AdamW.step"], [[99, 8]], "optimizer and clipping"),
        (["aten::embedding"], [[99, 8]], REST),
    ],
)
def test_an_operation_has_one_kind(names, shapes, kind):
    assert kind_of(nested(*names, shapes=shapes), vocabulary=99) == kind


def test_parts_of_a_step_are_shown():
    parts = dict.fromkeys(step_parts.KINDS, 1.0)
    report = {"machine": "m", "threads": 1, "torch": "2", "parts": {"d 8, float32": {"ours": parts}}}
    assert "| norms | 1 (12%) |" in step_parts.table(report)
