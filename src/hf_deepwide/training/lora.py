"""Low-rank adaptation (Hu et al. 2021, arXiv 2106.09685): train small matrices beside the frozen projections.

    y = W x + b + (alpha / r) B A x        A: [r, inputs], B: [outputs, r]; B begins at zero

PEFT computes y. Each checkpoint holds the whole model, with A and B merged into W, like any other checkpoint. So the
checkpoint can translate, be averaged and be shared without PEFT. Its folder `adapter` holds the trained parameters:

    adapter_model.safetensors, adapter_config.json    A and B, as PEFT loads them
    new_rows.safetensors                              embeddings of tokens that the base did not have, if there are any

Training resumes from the base and this folder.
"""

import json
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import PreTrainedModel

from ..checkpoint_files import ADAPTER, WEIGHTS
from ..errors import UserError, need, one_line, quote, some

if TYPE_CHECKING:
    from .trainer import TokenBatchTrainer

logger = logging.getLogger(__name__)

FOLDER, ROWS = "adapter", "new_rows.safetensors"
PEFT_PREFIX = "base_model.model."  # prefix of the names in PEFT's files
NAME = "default"  # name of the adapter


@dataclass
class LoraArguments:
    """The fields that `Lora` adds to a Trainer's arguments; their ranges are in `ranges.py`."""

    lora_r: int = field(default=0, metadata={"help": "Rank of LoRA's matrices; 0: train the whole model."})
    lora_alpha: float | None = field(
        default=None, metadata={"help": "LoRA's product is multiplied by alpha / r. Default: twice lora_r."}
    )
    lora_dropout: float = field(default=0.0, metadata={"help": "Dropout on the input of LoRA's matrices."})
    lora_target_modules: str | list[str] = field(
        default="all-linear",
        metadata={"help": "The projections that get LoRA's matrices, by the ends of their names; or all-linear."},
    )

    def check_lora(self) -> None:
        """Refuse fields that only LoRA uses, if LoRA is off.

        Raises:
            ValueError: the message names a field, and what is accepted.
        """
        for name in ("lora_alpha", "lora_dropout", "lora_target_modules") if not self.lora_r else ():
            value, default = getattr(self, name), getattr(LoraArguments, name)
            if value != default:
                raise ValueError(
                    f"{name} is {quote(value)}, and without LoRA it changes nothing; set lora_r to a rank, leave "
                    f"{name} out, or set it to {json.dumps(default)}"
                )


class Lora:
    """The part of a trainer for LoRA. It does nothing if LoRA is off. Its arguments are `LoraArguments`.

    Args:
        trainer: the trainer, whose model and arguments it looks at.

    Raises:
        UserError: LoRA is on, and the weights are sharded or the layers would get no gradient.
    """

    def __init__(self, trainer: "TokenBatchTrainer") -> None:
        self.trainer = trainer
        self.new_rows: Sequence[int] = ()  # tokens that the base did not have; set by the code that makes the model
        self.begun = False
        if trainer.args.lora_r and trainer.is_fsdp_enabled:
            raise UserError("training.lora_r: adapters are not sharded; train without FSDP (MULTI_GPU)")
        options = trainer.args.gradient_checkpointing_kwargs or {}
        if trainer.args.lora_r and trainer.args.gradient_checkpointing and options.get("use_reentrant"):
            raise UserError(
                "training.gradient_checkpointing_kwargs: use_reentrant: true gives LoRA no gradients, as the "
                "embeddings have none; set it to false"
            )

    def begin(self) -> None:
        """Put A and B beside the projections, and freeze everything else except new rows of embeddings.

        Raises:
            UserError: PEFT is not installed; or `lora_target_modules` selects no module, a module that is not linear,
                or a module whose weight is also that of an embedding.
        """
        args, model = self.trainer.args, self.trainer.model
        if not args.lora_r or self.begun:
            return
        need("peft", "lora", "training.lora_r")
        from peft import LoraConfig, inject_adapter_in_model
        from peft.tuners.lora import Linear, LoraLayer

        config = LoraConfig(
            task_type="SEQ_2_SEQ_LM",
            r=args.lora_r,
            lora_alpha=2 * args.lora_r if args.lora_alpha is None else args.lora_alpha,
            lora_dropout=args.lora_dropout,
            target_modules=args.lora_target_modules,
        )
        with torch.random.fork_rng():  # A is random; training's random numbers stay the same
            torch.manual_seed(args.seed)
            try:
                inject_adapter_in_model(config, model, NAME)
            except ValueError as error:
                wanted = quote(args.lora_target_modules)
                raise UserError(
                    f"training.lora_target_modules: {wanted}: {one_line(error)} Accepted: all-linear, or a list of "
                    "ends of names, such as [q_proj, v_proj]"
                ) from error
        for name, module in model.named_modules():
            if isinstance(module, LoraLayer) and not isinstance(module, Linear):
                kind = type(module.get_base_layer()).__name__
                raise UserError(f"training.lora_target_modules: {name} is a {kind}; accepted: linear layers")
        self._check_tying()
        for table in self._tables().values() if self.new_rows else ():
            is_new = torch.zeros(len(table), *(1 for _ in table.shape[1:]), dtype=torch.bool, device=table.device)
            is_new[list(self.new_rows)] = True
            table.requires_grad_()
            # Bind `is_new` now, because the loop changes it. Use `where`, because 0 times an infinite gradient is NaN.
            table.register_hook(lambda gradient, is_new=is_new: gradient.where(is_new, 0.0))
        self.begun = True
        learns = sum(weight.numel() for name, weight in model.named_parameters() if ".lora_" in name)
        learns += sum(len(self.new_rows) * table[0].numel() for table in self._tables().values())
        logger.info("LoRA trains %s of %s parameters", f"{learns:,}", f"{model.num_parameters():,}")
        names = getattr(model, "no_weight_decay", ())  # those that join, weigh or select layers and paths
        if kept := [name for name, _ in model.named_parameters() if name.rpartition(".")[2] in names]:
            logger.warning("LoRA leaves %s as in the base; to train what joins layers, train without LoRA", some(kept))

    def _check_tying(self) -> None:
        """Refuse to adapt a weight that is tied to an embedding: merging A and B into one of them would untie them."""
        model = self.trainer.model
        parts = (model.get_encoder(), model.get_decoder())
        embeddings = {id(part.get_input_embeddings().weight) for part in parts}
        for name, layer in self._layers():
            if id(layer.get_base_layer().weight) in embeddings:
                raise UserError(
                    f"training.lora_target_modules: the weight of {name} is also that of the embeddings (the base "
                    "ties them), which LoRA leaves alone; accepted: linear layers with a weight of their own. Leave "
                    f"{name} out"
                )

    def frozen_tables(self) -> set[str]:
        """Return the names of the embeddings: with LoRA, weight decay must not change their rows."""
        return set(self._tables()) if self.begun else set()

    def merged_weights(self) -> dict[str, torch.Tensor]:
        """Return the weights of the whole model, with A and B merged into copies of the projections."""
        weights = self._base_weights()
        with torch.no_grad():
            for name, layer in self._layers():
                # one after the other: a GPU may not have enough memory for a copy of all projections
                weights[f"{name}.weight"] = (layer.get_base_layer().weight + layer.get_delta_weight(NAME)).cpu()
        return weights

    def _base_weights(self) -> dict[str, torch.Tensor]:
        """Return all weights except A and B, by their names in the model without LoRA."""
        model: PreTrainedModel = self.trainer.model
        return {
            name.replace(".base_layer.", "."): tensor
            for name, tensor in model.state_dict().items()
            if ".lora_" not in name
        }

    def save(self, checkpoint: Path) -> None:
        """Write the folder `adapter` of a checkpoint."""
        from peft import get_peft_model_state_dict

        model, folder = self.trainer.model, checkpoint / FOLDER
        folder.mkdir(exist_ok=True)
        config = model.peft_config[NAME]
        config.base_model_name_or_path = model.name_or_path or None
        config.save_pretrained(str(folder))
        weights = get_peft_model_state_dict(model, adapter_name=NAME, save_embedding_layers=False)
        save_file({PEFT_PREFIX + name: tensor.contiguous() for name, tensor in weights.items()}, folder / ADAPTER)
        if self.new_rows:
            rows = {name: table.detach()[list(self.new_rows)] for name, table in self._tables().items()}
            save_file(rows, folder / ROWS)

    def load(self, checkpoint: Path) -> None:
        """Load the folder `adapter` of a checkpoint, if the checkpoint was trained on the same base.

        Raises:
            UserError: the base differs, a file is missing, or its weights do not belong to the adapter.
            RuntimeError: the rank differs.
        """
        from peft import set_peft_model_state_dict

        folder, model = checkpoint / FOLDER, self.trainer.model
        for name in (ADAPTER, ROWS) if self.new_rows else (ADAPTER,):
            if not (folder / name).is_file():
                raise UserError(f"{checkpoint}: there is no {FOLDER}/{name}, which training with LoRA goes on from")
        with torch.no_grad():
            for name, rows in load_file(folder / ROWS).items() if self.new_rows else ():
                self._tables()[name][list(self.new_rows)] = rows.to(model.device)
        self._check_base(checkpoint)
        weights = load_file(folder / ADAPTER)
        result = set_peft_model_state_dict(
            model, {name.removeprefix(PEFT_PREFIX): tensor for name, tensor in weights.items()}, adapter_name=NAME
        )
        odd = sorted(result.unexpected_keys) + sorted(name for name in result.missing_keys if ".lora_" in name)
        if odd:
            raise UserError(f"{folder} has weights that do not belong to this model's adapter: {some(odd)}")

    def _check_base(self, checkpoint: Path) -> None:
        """Compare all weights except the adapted projections with the weights in the checkpoint."""
        adapted = {f"{name}.weight" for name, _ in self._layers()}
        mine = self._base_weights()
        with safe_open(checkpoint / WEIGHTS, "pt") as file:
            for name in sorted({*file.keys()} - adapted):
                if not torch.equal(mine[name].cpu(), file.get_tensor(name)):
                    raise UserError(
                        f"{checkpoint}: {name} is not as in model.init_from, so the base is not the one that training "
                        "began with. Put it back, or --overwrite to start afresh"
                    )

    def _layers(self) -> Iterator[tuple[str, Any]]:
        """Return the projections that have A and B, by their names in the model without LoRA."""
        from peft.tuners.lora import LoraLayer

        return ((name, module) for name, module in self.trainer.model.named_modules() if isinstance(module, LoraLayer))

    def _tables(self) -> dict[str, nn.Parameter]:
        """Return the embeddings and the output projection with its bias, by name; tied weights once."""
        model = self.trainer.model
        head = model.get_output_embeddings()
        modules = (model.get_encoder().get_input_embeddings(), model.get_decoder().get_input_embeddings(), head)
        wanted = {id(module.weight) for module in modules} | {id(getattr(head, "bias", None))}
        return {name: parameter for name, parameter in model.named_parameters() if id(parameter) in wanted}
