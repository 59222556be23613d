"""Models whose layers are joined in other ways: a resumed run equals an undisturbed run."""

import pytest
import torch
from model_cases import JOINTS
from tiny_run import counted_updates, tiny_corpus, tiny_trainer


@pytest.fixture(scope="module")
def corpus():
    return tiny_corpus()


@pytest.mark.parametrize("name", JOINTS)
def test_a_resumed_run_is_the_run_that_was_left_alone(name, corpus, tmp_path):
    """Weights, optimizer moments, dropout and the logged values of the joints are the same bit for bit."""
    model = {**JOINTS[name], "dropout": 0.2, "decoder_layers": 2}
    once, again = (
        tiny_trainer(corpus, tmp_path, "vanilla_transformer", dict(model), max_steps=5, save_steps=3) for _ in range(2)
    )
    once.train()
    with counted_updates() as made:
        again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert made == [4, 5]
    assert again.state.global_step == 5
    theirs = dict(again.model.named_parameters())
    assert [key for key, weight in once.model.named_parameters() if not torch.equal(weight, theirs[key])] == []
    moments = [trainer.optimizer.state_dict()["state"] for trainer in (once, again)]
    torch.testing.assert_close(moments[1], moments[0], rtol=0, atol=0)
    logs = [
        [
            {key: value for key, value in entry.items() if key.startswith(("loss", "grad_norm")) or "/" in key}
            for entry in trainer.state.log_history
            if "loss" in entry
        ]
        for trainer in (once, again)
    ]
    assert len(logs[0]) == 5
    assert logs[1] == logs[0]
