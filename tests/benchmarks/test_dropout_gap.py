"""The losses of `benchmarks/dropout_gap.py`, compared with a sum over single tokens, and its report."""

import dropout_gap
import pytest
import torch
from word_models import tiny_model, tiny_tokenizer

SOURCES = ["w1 w2 w3", "w2", "w3 w3 w1 w2"]
TARGETS = ["w3 w2 w1", "w2 w2", "w9"]


def test_a_loss_is_the_mean_over_tokens_with_dropout_only_where_it_is_drawn():
    model, tokenizer = tiny_model(), tiny_tokenizer()
    total, count = 0.0, 0
    for source, target in zip(SOURCES, TARGETS, strict=True):  # one sentence at a time, without padding
        labels = tokenizer(target).input_ids
        given = torch.tensor([[model.config.decoder_start_token_id, *labels[:-1]]])
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([tokenizer(source).input_ids]), decoder_input_ids=given).logits[0]
        for position, label in enumerate(labels):
            total -= logits[position].log_softmax(-1)[label].item()
            count += 1
    without = dropout_gap.mean_loss(model, tokenizer, SOURCES, TARGETS, draws=0)
    assert without == pytest.approx(total / count, rel=1e-5)
    dropped = [dropout_gap.mean_loss(model, tokenizer, SOURCES, TARGETS, draws=draws) for draws in (1, 1, 3)]
    assert dropped[0] == dropped[1] != dropped[2]
    assert abs(dropped[0] - without) > 1e-3
    model.config.dropout = 0.0
    for module in model.modules():
        module.dropout = 0.0
    assert dropout_gap.mean_loss(model, tokenizer, SOURCES, TARGETS, draws=2) == pytest.approx(without, rel=1e-5)


def test_the_report_shows_the_last_checkpoint_and_draws_all(tmp_path):
    losses = [{"update": step, "with dropout": 9 - step, "without": 8 + step, "validation": 8.5} for step in (1, 2)]
    report = {"vocabulary": 100, "systems": {"post-norm": losses}}
    text = dropout_gap.table(report)
    assert "| post-norm | 2 | 7.00 | 10.00 | 8.50 |" in text
    assert "4.61" in text, "log 100"
    dropout_gap.draw(report, tmp_path / "gap.png")
    assert (tmp_path / "gap.png").is_file()


@pytest.mark.parametrize("title", dropout_gap.VARIANTS)
def test_each_variant_is_a_recipe_with_a_decoder_of_24_layers(title, tmp_path):
    values = dropout_gap.recipe_of(tmp_path, title).values
    assert (values["model"]["decoder_layers"], values["model"]["d_model"]) == (24, 128)
    assert values["training"]["warmup_steps"] <= values["training"]["max_steps"] == dropout_gap.UPDATES
