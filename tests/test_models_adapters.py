"""LoRA on the wide projections, whose branches may be dropped while an adapter wraps them."""

import pytest
import torch
from model_cases import build, pair
from peft import LoraConfig, PeftModel, get_peft_model

TARGETS = {
    "as usual": ["q_proj", "v_proj", "out_proj", "fc1"],
    "inputs only": ["q_proj", "k_proj", "v_proj"],
    "outputs only": ["out_proj", "fc2"],
    "everything": "all-linear",
}


WIDE = {
    "mat": ("mat-3", {"ffn_branches": 2}),
    "multipath": ("multipath-3-more", {}),
    "multipath without norms": ("multipath-3-more", {"path_norm": False}),
    "lstm": ("lstm-two", {}),
}


def wide(family="mat", **changes):
    case, fields = WIDE[family]
    return build(case, **fields, **changes)


def adapted(targets, family="mat", **changes):
    model = wide(family, **changes)
    torch.manual_seed(7)
    return get_peft_model(model, LoraConfig(r=2, target_modules=TARGETS[targets], init_lora_weights=False))


@pytest.mark.parametrize("family", WIDE)
@pytest.mark.parametrize("targets", TARGETS)
def test_merging_an_adapter_changes_nothing(targets, family):
    model = adapted(targets, family).eval()
    with torch.no_grad():
        with model.disable_adapter():
            base = model(**pair()).logits
        unmerged = model(**pair()).logits
        merged = model.merge_and_unload()(**pair()).logits
    assert (unmerged - base).abs().mean() > 0.05
    torch.testing.assert_close(merged, unmerged, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("drop_unit", ["branch", "head"])
@pytest.mark.parametrize("targets", TARGETS)
def test_an_adapted_model_drops_as_a_merged_one(targets, drop_unit):
    """Adapted branches are weighed by 0 or 1, merged ones left out: with one seed the losses are the same."""
    options = {"drop_branch": 0.4, "drop_unit": drop_unit}
    one, two = adapted(targets, **options).train(), adapted(targets, **options).merge_and_unload().train()
    losses = set()
    for seed in range(3):
        with torch.no_grad():
            torch.manual_seed(seed)
            unmerged = one(**pair()).loss
            torch.manual_seed(seed)
            torch.testing.assert_close(two(**pair()).loss, unmerged, rtol=1e-5, atol=1e-5)
        losses.add(unmerged.item())
    assert len(losses) == 3


@pytest.mark.parametrize("targets", TARGETS)
def test_training_an_adapter_changes_it_and_nothing_else(targets, tmp_path):
    model = adapted(targets, drop_branch=0.4).train()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    torch.manual_seed(0)
    for _ in range(3):
        loss = model(**pair(), skip_logits=True, label_smoothing=0.1).loss
        loss.backward()
        assert [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None] == []
        optimizer.step()
    changed = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert changed == {name for name in before if "lora_" in name}
    model.eval().save_pretrained(tmp_path)
    again = PeftModel.from_pretrained(wide(), tmp_path).eval()
    with torch.no_grad():
        assert torch.equal(again(**pair()).logits, model(**pair()).logits)
