"""What Transformers and its neighbours ask of a model: back-ends, compilation, half precision, adapters."""

import pytest
import torch
from model_cases import CASES, build, pair
from peft import LoraConfig, get_peft_model


EVERY = pytest.mark.parametrize("case", CASES)


def gradients(model, **inputs):
    model.zero_grad()
    loss = model(**inputs).loss
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters()}


# Back-ends and compilation


@EVERY
def test_attention_back_ends_agree(case):
    model, batch = build(case), pair()
    wanted, wanted_grads = None, None
    for back_end in ("eager", "sdpa"):
        model.set_attn_implementation(back_end)
        loss, grads = gradients(model, **batch)
        if wanted is None:
            wanted, wanted_grads = loss, grads
        torch.testing.assert_close(loss, wanted)
        torch.testing.assert_close(grads, wanted_grads, rtol=1e-3, atol=1e-4)


def test_flex_attention_agrees():
    """Forward only: PyTorch has no backward pass of flex attention on CPUs. Its heads are at least 16 wide."""
    batch = pair()
    model = build("mat-3", d_model=32, encoder_attention_heads=2, decoder_attention_heads=2)
    with torch.no_grad():
        wanted = model(**batch).logits
        model.set_attn_implementation("flex_attention")
        real = batch["labels"] != -100
        with torch.compiler.set_stance("force_eager"):  # compiling its kernel takes a minute
            torch.testing.assert_close(model(**batch).logits[real], wanted[real], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("case", ["vanilla", "mat-3"])
def test_compiles_whole(case):
    model, batch = build(case), pair()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        torch.testing.assert_close(compiled(**batch).logits, model(**batch).logits, rtol=1e-4, atol=1e-4)


def test_training_with_dropped_branches_compiles():
    """With a break in the graph at every draw; the same draws give the same loss."""
    model, batch = build("mat-3", drop_branch=0.4).train(), pair()
    compiled = torch.compile(model, backend="eager")
    for seed in range(3):
        torch.manual_seed(seed)
        wanted = model(**batch).loss
        torch.manual_seed(seed)
        torch.testing.assert_close(compiled(**batch).loss, wanted)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@EVERY
def test_half_precision_is_finite(case, dtype):
    output = build(case).to(dtype)(**pair())
    assert output.logits.dtype == dtype
    assert output.logits.isfinite().all()
    assert output.loss.isfinite()


# Adapters


@pytest.mark.parametrize("drop_branch", [0.0, 0.4])
def test_lora_on_the_wide_projections(drop_branch):
    model, batch = build("mat-3", drop_branch=drop_branch, ffn_branches=2), pair()
    lora = LoraConfig(r=2, target_modules=["q_proj", "v_proj", "out_proj", "fc1", "fc2"], init_lora_weights=False)
    adapted = get_peft_model(model, lora).train()
    loss = adapted(**batch).loss
    loss.backward()
    trained = [name for name, p in adapted.named_parameters() if p.requires_grad and p.grad is None]
    assert trained == []
    adapted.eval()
    with torch.no_grad():
        unmerged = adapted(**batch).logits
        merged = adapted.merge_and_unload()(**batch).logits
    torch.testing.assert_close(merged, unmerged, rtol=1e-3, atol=1e-3)
