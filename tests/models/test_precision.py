"""Low precision: every family stays finite, near to float32, and independent of padding, also with extreme numbers."""

import finite
import pytest
import torch
from model_cases import CASES, build, pair, source, tokens

from hf_deepwide.families import FAMILIES
from hf_deepwide.training import arguments
from hf_deepwide.training.arguments import TranslationTrainingArguments

TOLERANCE = {"base": 1e-3, "big": 1e-3, "extreme": 0.05, "depth": 0.02}  # of the loss, relative to the loss in float32


def check(family: str, kind: str, attention: str, length: int, precisions=tuple(finite.DTYPES)) -> None:
    results = finite.compare(family, kind, attention, length, precisions=precisions)
    expected = results.pop("float32")
    assert (expected["modules"], expected["gradients"]) == ([], [])
    for name, found in results.items():
        assert (name, found["modules"], found["gradients"]) == (name, [], [])
        assert found["loss"] == pytest.approx(expected["loss"], rel=TOLERANCE[kind]), name
        if kind in ("base", "big"):  # else the smallest gradients round to 0; a loss scaler would help
            assert found["trained"] == expected["trained"], "gradients reach all parameters that they reach in float32"


@pytest.mark.parametrize(
    ("family", "attention"),
    [*((family, "sdpa") for family in FAMILIES), ("mat", "eager"), ("depthwise_lstm", "eager")],
)
def test_a_layer_of_the_base_size_stays_finite(family, attention):
    """With the longest sentence that the model accepts, a sentence of one token, and a row of only padding.

    All families share the code of eager attention. The test of extreme scores, below, runs it in each family.
    """
    check(family, "base", attention, length=16)


@pytest.mark.parametrize("family", ["mat", "depthwise_lstm"])
def test_a_layer_of_the_big_size_stays_finite(family):
    """In fp16, which has the narrower range. The other families have sums of the same lengths."""
    check(family, "big", "sdpa", length=4, precisions=["float16"])


@pytest.mark.parametrize("attention", finite.ATTENTIONS)
@pytest.mark.parametrize("family", FAMILIES)
def test_extreme_scores_and_logits_stay_finite(family, attention):
    check(family, "extreme", attention, length=8)


@pytest.mark.parametrize("family", FAMILIES)
def test_twenty_four_layers_stay_finite(family):
    check(family, "depth", "eager", length=16)


@pytest.mark.parametrize("attention", finite.ATTENTIONS)
@pytest.mark.parametrize("dtype", finite.DTYPES.values(), ids=finite.DTYPES)
@pytest.mark.parametrize("case", CASES)
def test_masks_suit_weights_in_half_precision(case, dtype, attention):
    """No autocast: the whole model has the dtype. Masked tokens have no influence at all, and nothing overflows."""
    model = build(case, attn_implementation=attention).to(dtype)
    batch = pair((7, 4, 5), (3, 6, 4))
    other = {**batch, "input_ids": batch["input_ids"].where(batch["attention_mask"] == 1, 9)}
    nothing = source((7, 4, 5))
    nothing["attention_mask"] = torch.tensor([[1] * 7, [0] * 7, [1] * 7])  # the second row is all padding
    with torch.no_grad():
        logits = model(**batch).logits
        assert torch.equal(model(**other).logits, logits)
        empty = model(**nothing, decoder_input_ids=tokens((3, 3, 3))[0]).logits
    assert logits.dtype == dtype
    assert logits.isfinite().all()
    assert empty.isfinite().all()


@pytest.mark.parametrize(
    ("vendor", "flags", "bf16"),
    [
        ("GenuineIntel", "avx512_bf16 amx_bf16", True),
        ("GenuineIntel", "avx512_bf16", False),
        ("AuthenticAMD", "avx512_bf16", True),
        ("AuthenticAMD", "avx512f", False),
    ],
)
def test_auto_is_bfloat16_where_that_is_faster(vendor, flags, bf16, tmp_path, monkeypatch):
    """On x86 with AMX. With only AVX-512's bfloat16 conversions and dot products, on AMD's processors alone."""
    monkeypatch.setattr(arguments.Path, "is_file", lambda *_: True)
    monkeypatch.setattr(arguments.Path, "read_text", lambda *_, **__: f"vendor_id : {vendor}\nflags : {flags}")
    training = TranslationTrainingArguments(str(tmp_path), use_cpu=True)
    assert (training.bf16, training.attn_implementation) == (bf16, "eager" if bf16 else "sdpa")
