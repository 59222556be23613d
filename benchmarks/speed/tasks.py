"""The tasks that are timed: a training step, and decoding by `generate`."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from harness import synchronize
from torch import nn
from transformers import MarianMTModel, PreTrainedModel

SMOOTHING = 0.1
SOURCE, NEW_TOKENS = 24, 40  # tokens of a source that is decoded, and of its translation


@dataclass(frozen=True)
class Training:
    """A step of forward, backward, clipping and AdamW."""

    precision: str = "float32"
    sentences: int = 64
    length: int = 32

    @property
    def title(self) -> str:
        """The column's head."""
        return f"training, {self.precision}"

    @property
    def tokens(self) -> int:
        """Target tokens of a step."""
        return self.sentences * self.length

    def step(self, model: PreTrainedModel, device: str) -> Callable[[], None]:
        """A function that takes one step on the same batch each time."""
        batch = training_batch(model, self.sentences, self.length, device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        scaler = torch.amp.GradScaler(device, enabled=self.precision == "float16")  # does nothing if it is not enabled
        loss_of = marian_loss if isinstance(model, MarianMTModel) else our_loss
        dtype = getattr(torch, self.precision)
        model.train()

        def step() -> None:
            with torch.autocast(device, dtype=dtype, enabled=dtype != torch.float32):
                loss = loss_of(model, batch)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            synchronize(device)

        return step


@dataclass(frozen=True)
class Decoding:
    """Decoding by `generate`: 40 tokens for each source of 24 tokens.

    The model has no end token. To forbid the end by `min_new_tokens` would cost more than a decoder layer, because
    Transformers then copies the scores of the whole vocabulary twice for each token.
    """

    sentences: int
    beams: int
    precision: str = "float32"

    @property
    def title(self) -> str:
        """The column's head."""
        search = "greedy" if self.beams == 1 else f"{self.beams} beams"
        return f"decoding, {self.sentences} sentence{'s' * (self.sentences > 1)}, {search}"

    @property
    def tokens(self) -> int:
        """Target tokens of a call."""
        return self.sentences * NEW_TOKENS

    def step(self, model: PreTrainedModel, device: str) -> Callable[[], None]:
        """A function that translates the same sources each time."""
        source = training_batch(model, self.sentences, SOURCE, device)["input_ids"]
        mask, dtype = torch.ones_like(source), getattr(torch, self.precision)
        model.eval()
        model.generation_config.eos_token_id = model.generation_config.forced_eos_token_id = None

        def step() -> None:
            with torch.autocast(device, dtype=dtype, enabled=dtype != torch.float32):
                tokens = model.generate(
                    input_ids=source,
                    attention_mask=mask,
                    num_beams=self.beams,
                    do_sample=False,
                    max_new_tokens=NEW_TOKENS,
                )
            assert tokens.shape == (self.sentences, 1 + NEW_TOKENS)
            synchronize(device)

        return step


def training_batch(model: PreTrainedModel, sentences: int, length: int, device: str) -> dict[str, torch.Tensor]:
    """A batch of random tokens `[sentences, length]`, the same for all systems with one vocabulary size."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(4, model.config.vocab_size, (2, sentences, length), generator=generator).to(device)
    return {"input_ids": tokens[0], "attention_mask": torch.ones_like(tokens[0]), "labels": tokens[1]}


def marian_loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Compute the loss as Trainer does for a model that has no label smoothing of its own: from the full logits."""
    labels = batch["labels"]
    start = torch.full_like(labels[:, :1], model.config.decoder_start_token_id)
    inputs = {**batch, "decoder_input_ids": torch.cat([start, labels[:, :-1]], 1), "use_cache": False}
    del inputs["labels"]
    logits = model(**inputs).logits
    return nn.functional.cross_entropy(
        logits.flatten(0, 1).float(), labels.flatten(), label_smoothing=SMOOTHING, reduction="mean"
    )


def our_loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Compute the loss as our trainer does."""
    return model(**batch, label_smoothing=SMOOTHING, skip_logits=True).loss
