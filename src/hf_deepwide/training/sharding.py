"""Weights, gradients and optimizer states spread over the processes (FSDP2), by accelerate and `torch.fully_shard`.

Each layer is a unit whose weights are gathered when the layer computes. Embeddings, final norms, output projection and
all modules that layers share are one more unit. Weights are kept, gathered and summed in float32, and cast by
autocast. So a sharded run computes the same as a run under DistributedDataParallel.

A checkpoint holds the shards from which training resumes (`pytorch_model_fsdp_0`, `optimizer_0`). Beside them it holds
the whole model in `model.safetensors`, as every other checkpoint does.
"""

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from ..errors import UserError

if TYPE_CHECKING:
    from .trainer import TokenBatchTrainer

LAYER_DROP = ("layer_drop", "encoder_layerdrop", "decoder_layerdrop")  # our name, and those of Marian and others


class Sharding:
    """The part of a trainer for sharded weights (`enabled`). It does nothing if the weights are not sharded.

    Args:
        trainer: the trainer, whose accelerator and model it looks at.

    Raises:
        UserError: the kind of sharding, or the model, is not supported.
    """

    def __init__(self, trainer: "TokenBatchTrainer") -> None:
        self.trainer, self.enabled = trainer, trainer.is_fsdp_enabled
        if not self.enabled:
            if os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true":
                raise UserError(
                    "accelerate shards on GPUs only, and there is none; give accelerate a config without FSDP "
                    "(distributed_type: MULTI_GPU, use_cpu: true)"
                )
            return
        plugin = trainer.accelerator.state.fsdp_plugin
        if plugin.fsdp_version != 2:
            raise UserError("fsdp_version is 1; accepted: 2 (in accelerate's config, or --fsdp_version 2)")
        if plugin.state_dict_type.name != "SHARDED_STATE_DICT":
            raise UserError(
                f"fsdp_state_dict_type is {plugin.state_dict_type.name}; accepted: SHARDED_STATE_DICT; the whole "
                "model is written beside the shards"
            )
        if plugin.cpu_ram_efficient_loading:
            raise UserError("fsdp_cpu_ram_efficient_loading is true; accepted: false, each process builds the model")
        for name in LAYER_DROP:
            if getattr(trainer.model.config, name, 0) > 0:
                raise UserError(
                    f"model.{name}: processes skip different layers, and with FSDP2 each waits for the others' part "
                    "of every layer; set it to 0, or train without FSDP (distributed_type: MULTI_GPU)"
                )
        plugin.transformer_cls_names_to_wrap = sorted(trainer.model._no_split_modules)
        plugin.mixed_precision_policy = None  # accelerate's would round loss and summed gradients to bfloat16

    def preparing(self) -> AbstractContextManager:
        """Return the context in which accelerate makes the units: accelerate finds no embeddings in it."""
        return embeddings_in_root(self.trainer.model) if self.enabled else nullcontext()

    def autocast(self) -> AbstractContextManager:
        """Return autocast if weights are sharded, because accelerate then leaves it out; else an empty context."""
        return self.trainer.accelerator.autocast() if self.enabled else nullcontext()

    def gathered_weights(self) -> dict[str, torch.Tensor]:
        """Return all weights (tied ones once) on the first process, nothing on the others. All processes call this."""
        weights = self.trainer.accelerator.get_state_dict(self.trainer.model)
        tied = self.trainer.model.all_tied_weights_keys  # gathered, they no longer share their storage
        return {name: weight for name, weight in weights.items() if name not in tied}

    @contextmanager
    def whole_weights(self) -> Iterator[None]:
        """Gather all weights on every process for the duration of the block.

        In the block, processes need not run in step: each may translate any number of sentences, and skip layers.
        """
        units = [module for module in self.trainer.model.modules() if isinstance(module, FSDPModule)]
        reshards = bool(units) and self.trainer.accelerator.state.fsdp_plugin.reshard_after_forward
        for unit in units:
            unit.unshard()
            unit.set_reshard_after_forward(False, recurse=False)
        try:
            yield
        finally:
            for unit in units:
                unit.reshard()
                if unit is not self.trainer.model:  # the root, with which the backward pass begins
                    unit.set_reshard_after_forward(reshards, recurse=False)


@contextmanager
def embeddings_in_root(model: nn.Module) -> Iterator[None]:
    """Hide the embeddings from accelerate, which would make units of them. These units do not work for our models.

    The units would hold the input and the output embedding. But our decoder may share the source embedding, and the
    loss uses the weight of the output projection without calling the projection.
    """
    model.get_input_embeddings = model.get_output_embeddings = lambda: None
    try:
        yield
    finally:
        del model.get_input_embeddings, model.get_output_embeddings
