"""Trainers of latent-depth models whose results can be compared with plain loops."""

import pytest
import torch
from tiny_run import tiny_recipe

from hf_deepwide.models import layer_selection
from hf_deepwide.runs.build import build_model
from hf_deepwide.training.translation import TranslationTrainer

LATENT = {
    "dropout": 0.0,
    "encoder_layers": 2,
    "decoder_layers": 3,
    "kl_weight": 0.3,
    "kl_anneal_steps": 0,
    "target_decoder_layers": 1.0,
    "target_depth_weight": 0.2,
    "target_depth_anneal_steps": 0,
    "layer_prior": "beta",
    "prior_select": 3.0,
}
SGD = {
    "optim": "sgd", "learning_rate": 0.5, "lr_scheduler_type": "constant", "warmup_steps": 0, "max_grad_norm": 0,
    "bf16": False, "eval_strategy": "no", "load_best_model_at_end": False, "max_tokens": 1024, "max_steps": 1,
    "logging_steps": 1,
}  # fmt: skip


def constant_noise(monkeypatch=None):
    """Use the same noise in every forward pass: losses are then sums over sentences, for any split into batches."""

    def noise(logits):
        return torch.linspace(-1, 1.5, logits.numel(), dtype=logits.dtype).view(logits.shape)

    (monkeypatch or pytest.MonkeyPatch()).setattr(layer_selection, "gumbel_difference", noise)


def build_trainer(corpus, folder, family="latent_depth", model=LATENT, **training):
    """A trainer in float64, so that results differ only if a sum is wrong."""
    recipe = tiny_recipe(folder, family=family, model=model, **{**SGD, **training})
    args = recipe.training_arguments()
    return TranslationTrainer(
        build_model(recipe, corpus.tokenizer, args).double(), args, corpus.tokenizer, train_dataset=corpus.encoded
    )


def first_batches(trainer, count):
    """Return the first `count` training batches, collated, and one collated batch of all their rows."""
    batches = list(trainer.get_train_dataloader().batch_sampler)[:count]
    rows = [[trainer.train_dataset[i] for i in batch] for batch in batches]
    return [trainer.data_collator(batch) for batch in rows], trainer.data_collator([row for r in rows for row in r])
