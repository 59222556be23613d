"""Weights, gradients and optimizer states spread over the processes (FSDP2), by accelerate and `torch.fully_shard`.

Each layer is a unit whose weights are gathered where it computes; embeddings, final norms, output projection and
whatever layers share stay together in one more. Weights are kept, gathered and summed in float32 and cast by autocast,
so that a sharded run computes what one under DistributedDataParallel does.

A checkpoint holds the shards that training is resumed from (`pytorch_model_fsdp_0`, `optimizer_0`) and beside them the
whole model in `model.safetensors`, as every other checkpoint does.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule

from ..errors import UserError
from .depth import posteriors_of

LAYER_DROP = ("layer_drop", "encoder_layerdrop", "decoder_layerdrop")  # ours, and as Marian and its like call it


class ShardedTraining:
    """What a Trainer inherits before `Trainer`; it does nothing where weights are not sharded.

    Raises:
        UserError: a kind of sharding, or a model, with which this does not work.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if not self.is_fsdp_enabled:
            if os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true":
                raise UserError("accelerate shards on GPUs only, and there is none; use scripts/accelerate/cpu.yaml")
            return
        plugin = self.accelerator.state.fsdp_plugin
        if plugin.fsdp_version != 2:
            raise UserError("fsdp_version is 1; accepted: 2, as in scripts/accelerate/fsdp2.yaml")
        if plugin.state_dict_type.name != "SHARDED_STATE_DICT":
            raise UserError(
                f"fsdp_state_dict_type is {plugin.state_dict_type.name}; accepted: SHARDED_STATE_DICT; the whole "
                "model is written beside the shards"
            )
        if plugin.cpu_ram_efficient_loading:
            raise UserError("fsdp_cpu_ram_efficient_loading is true; accepted: false, each process builds the model")
        for name in LAYER_DROP:
            if getattr(self.model.config, name, 0) > 0:
                raise UserError(
                    f"model.{name}: processes skip different layers, and with FSDP2 each waits for the others' part "
                    "of every layer; set it to 0, or train with scripts/accelerate/ddp.yaml"
                )
        present = {type(module).__name__ for module in self.model.modules()}
        plugin.transformer_cls_names_to_wrap = sorted(present & set(self.model._no_split_modules))
        plugin.mixed_precision_policy = None  # accelerate's would round the loss and the sums of gradients to bfloat16

    def _prepare_for_training(self, *args: Any, **kwargs: Any) -> Any:
        with embeddings_in_root(self.model) if self.is_fsdp_enabled else nullcontext():
            prepared = super()._prepare_for_training(*args, **kwargs)
        self.posteriors = posteriors_of(self.model)  # as shards they are other objects
        return prepared

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        """As the parent, under autocast, which accelerate leaves out where weights are sharded."""
        with self.accelerator.autocast() if self.is_fsdp_enabled else nullcontext():
            return super().compute_loss(*args, **kwargs)

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """As the parent, with whole weights."""
        with self.whole_weights():
            return super().evaluate(*args, **kwargs)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """As the parent; what is logged of the model beside the loss is looked up in whole weights."""
        with self.whole_weights() if "loss" in logs else nullcontext():
            super().log(logs, *args, **kwargs)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """As the parent, which writes only shards of a sharded model; here the whole model is written beside them."""
        if not self.is_fsdp_enabled:
            super().save_model(output_dir, _internal_call)
            return
        weights = self.accelerator.get_state_dict(self.model)  # all processes take part, the first one gets them
        if self.args.should_save:
            self._save(output_dir, state_dict=weights)

    @contextmanager
    def whole_weights(self) -> Iterator[None]:
        """Gather all weights on every process for a while.

        Within, processes need not keep step: each may translate as many sentences as it has, and leave out layers.
        """
        units = [module for module in self.model.modules() if isinstance(module, FSDPModule)]
        reshards = bool(units) and self.accelerator.state.fsdp_plugin.reshard_after_forward
        for unit in units:
            unit.unshard()
            unit.set_reshard_after_forward(False, recurse=False)
        try:
            yield
        finally:
            for unit in units:
                unit.reshard()
                if unit is not self.model:  # with which the backward pass begins
                    unit.set_reshard_after_forward(reshards, recurse=False)


@contextmanager
def embeddings_in_root(model: nn.Module) -> Iterator[None]:
    """Hide the embeddings from accelerate, which makes units of them that ours cannot be.

    Its units hold input and output embedding; our source embedding may be the decoder's, too, and the loss uses the
    output projection's weight without calling it.
    """
    model.get_input_embeddings = model.get_output_embeddings = lambda: None
    try:
        yield
    finally:
        del model.get_input_embeddings, model.get_output_embeddings
