"""The work of each of two processes in the tests of scale, in one launch, because starting takes most of the time.

`accelerate launch … tests/helpers/scale_worker.py main FOLDER` writes its results into the folder. The tests also call
the functions, in one process. `make_trainer` uses float64, so that results differ only by wrong sums or wrong draws.
"""

import gc
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DistributedType
from latent_runs import LATENT, constant_noise
from model_cases import JOINTS
from safetensors.torch import save_file
from tiny_run import counted_updates, hold_out_few, leave_figures_blank, tiny_corpus, tiny_recipe, tiny_values
from torch.distributed.tensor import DTensor

from hf_deepwide.data.arguments import DataArguments
from hf_deepwide.data.corpora import load_parallel
from hf_deepwide.data.encoding import encode
from hf_deepwide.errors import UserError
from hf_deepwide.models import layer_selection
from hf_deepwide.models.dropout import Dropout
from hf_deepwide.runs.build import build_model
from hf_deepwide.runs.masked_lm import MaskedLMRecipe, run_masked_lm
from hf_deepwide.runs.recipe import check_recipe
from hf_deepwide.runs.run import run_recipe
from hf_deepwide.training import translation as translation_module
from hf_deepwide.training.faults import NonFiniteError
from hf_deepwide.training.process_group import leaving_process_group
from hf_deepwide.training.translation import TranslationTrainer

FAMILIES = {
    "vanilla_transformer": {},
    "mat": {"attention_branches": 2},
    "multipath_transformer": {"encoder_paths": 2},
    "latent_depth": LATENT,
    "depthwise_lstm": {"share_gates": "stack", "encoder_layers": 2},
    "marian": {},
    # vanilla models that have further parameters, outside attention and feed-forward networks
    **{name: JOINTS[name] for name in ("deepnorm-denseformer", "rk2", "attention", "hyper", "mhc")},
}
DROPPING = {
    "vanilla_transformer": {"layer_drop": 0.5, "encoder_layers": 2, "decoder_layers": 2},
    "mat": {"attention_branches": 3, "drop_branch": 0.4},
    "multipath_transformer": {"encoder_paths": 2},
    "latent_depth": LATENT,
    "depthwise_lstm": {},
}
TRAINING = {
    "bf16": False, "eval_strategy": "no", "load_best_model_at_end": False, "max_tokens": 1024, "max_steps": 6,
    "save_strategy": "steps", "save_steps": 100, "logging_steps": 3,
}  # fmt: skip
SENTENCES = 41  # size of the validation set: an odd number, and prime
STREAMED = 149  # pairs in the file that is streamed: an odd number


def make_trainer(corpus: SimpleNamespace, folder: Path, family: str, model: dict, **training: Any):
    family = "vanilla_transformer" if family in JOINTS else family
    recipe = tiny_recipe(folder, family=family, model=model, **{**TRAINING, **training})
    args = recipe.training_arguments()
    return TranslationTrainer(
        build_model(recipe, corpus.tokenizer, args).double(), args, corpus.tokenizer, train_dataset=corpus.encoded
    )


def without_dropping(family: str) -> dict[str, Any]:
    """The model section of a family, without dropout and without dropped branches."""
    return {**FAMILIES[family], "dropout": 0.0, **({"drop_branch": 0.0} if family == "mat" else {})}


def train_without_dropping(corpus: SimpleNamespace, folder: Path, family: str, **training: Any):
    """Train six steps (over an epoch) with label smoothing, all loss terms, Adam and clipping. Return the trainer."""
    training |= {"max_grad_norm": 0.5, "gradient_norms": True}
    if family == "latent_depth":
        training["inner_steps"] = 2
    with pytest.MonkeyPatch.context() as patch:
        constant_noise(patch)
        trainer = make_trainer(corpus, folder, family, without_dropping(family), **training)
        trainer.train()
    return trainer


def weights_of(trainer: TranslationTrainer) -> dict[str, torch.Tensor]:
    """Return all weights, on every process."""
    weights = trainer.accelerator.get_state_dict(trainer.model)
    return {name: tensor.clone() for name, tensor in weights.items()}


def keep(trainer: TranslationTrainer, name: Path) -> None:
    """Write a trainer's weights, log and number of target tokens, on the first process."""
    weights = weights_of(trainer)
    if trainer.is_world_process_zero():
        save_file(weights, f"{name}.safetensors")
        told = {"log": trainer.state.log_history, "target_tokens": trainer.throughput.state()["args"]["target_tokens"]}
        Path(f"{name}.json").write_text(json.dumps(told), encoding="utf-8")


def train_with_faults(
    corpus: SimpleNamespace, folder: Path, spoilt: dict[int, str], **training: Any
) -> tuple[TranslationTrainer, str]:
    """Train six steps of four batches. Some batches are spoilt, and only those of this process.

    Args:
        spoilt: the fault of each spoilt batch, by its number from 1. "gradient": loss and gradient are nan. "loss":
            the loss is infinite, the gradient finite.

    Returns:
        The trainer, and the message of the error that stopped it ("" if none did).
    """
    options = {"max_steps": 6, "logging_steps": 6, "max_grad_norm": 0.5, "max_tokens": 512, **training}
    trainer = make_trainer(corpus, folder, "mat", without_dropping("mat"), **options)
    compute, calls = trainer.compute_loss, iter(range(1, 1000))

    def compute_loss(*args: Any, **kwargs: Any) -> torch.Tensor:
        loss, wrong = compute(*args, **kwargs), spoilt.get(next(calls))
        return loss * torch.nan if wrong == "gradient" else loss + torch.inf if wrong == "loss" else loss

    trainer.compute_loss = compute_loss
    try:
        trainer.train()
    except NonFiniteError as error:
        return trainer, str(error)
    return trainer, ""


def limit_memory(trainer: TranslationTrainer, tokens: int, where: str, error: Exception | None = None) -> list[int]:
    """Make training run out of memory in batches of more than `tokens` source tokens.

    Args:
        where: "input": before the model computes. In the encoder's last layer: "forward", when dropout has drawn
            numbers, or "backward", when the gradients of the decoder have been added.

    Returns:
        A list to which each failure appends its step.
    """
    failures: list[int] = []

    def check(size: int) -> None:
        if size > tokens:
            failures.append(trainer.state.global_step + 1)
            raise error or torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    def after(module: Any, inputs: Any, output: Any) -> None:
        states = output[0] if isinstance(output, tuple) else output
        size = states.shape[0] * states.shape[1]
        if where == "backward":
            states.register_hook(lambda _: check(size))
        elif module.training:
            check(size)

    prepare = trainer._prepare_inputs

    def before(inputs: Any) -> Any:
        if trainer.model.training:
            check(inputs["input_ids"].numel())
        return prepare(inputs)

    if where == "input":
        trainer._prepare_inputs = before
    else:
        trainer.model.model.encoder.layers[-1].register_forward_hook(after)
    return failures


def keep_faults(corpus: SimpleNamespace, out: Path, name: str) -> dict[str, Any]:
    """Train with a spoilt batch of the second process in steps 2 and 4: first skip the steps, then stop at step 2.

    Each process writes its own weights after each training (sharded weights as a whole). Returns the error messages,
    and of the first training the log and the number of optimizer steps made.
    """
    rank = int(os.environ["RANK"])
    spoilt = {3: "gradient", 7: "loss"} if rank == 1 else {}
    told = {}
    for action in ("skip", "stop"):
        trainer, told[action] = train_with_faults(
            corpus, out / f"{name}-{action}", spoilt, on_nonfinite=action, gradient_accumulation_steps=2
        )
        own = {
            key: weight.full_tensor() if isinstance(weight, DTensor) else weight
            for key, weight in trainer.model.named_parameters()
        }
        save_file(own, out / f"{name}-{action}-{rank}.safetensors")
        if action == "skip":
            told["log"] = trainer.state.log_history
            told["made"] = sorted({int(state["step"]) for state in trainer.optimizer.state.values()})
    return told


def train_short_of_memory(corpus: SimpleNamespace, folder: Path, family: str, where: str) -> list[int]:
    """Train without dropping. Memory runs out in the second process only. Return the steps where it ran out."""
    rank = int(os.environ["RANK"])
    trainer = make_trainer(corpus, folder, family, without_dropping(family), max_grad_norm=0.5)
    failures = limit_memory(trainer, 512, where) if rank else []
    trainer.train()
    keep(trainer, folder)
    return failures


def stream_twice(corpus: SimpleNamespace, folder: Path) -> dict[str, Any]:
    """Train on a streamed file, with dropout. Then resume from the checkpoint of step 13, and train to the end again.

    Returns:
        `once`, `again`: this process's batches in both trainings. `weights`: whether both end with the same weights.
    """
    data = DataArguments(
        format="tsv", root=str(folder), train="train.tsv", source_lang="de", target_lang="en", streaming=True,
        shuffle_buffer=64, max_length=128,
    )  # fmt: skip
    recipe = tiny_recipe(folder / "run", **{**TRAINING, "max_tokens": 512, "max_steps": 18, "save_steps": 13})
    args = recipe.training_arguments()
    if PartialState().is_main_process:
        folder.mkdir()
        texts = load_parallel(recipe.data, "train").select(range(STREAMED))
        lines = (f"{source}\t{target}\n" for source, target in zip(texts["source"], texts["target"], strict=True))
        (folder / "train.tsv").write_text("".join(lines), encoding="utf-8")
    PartialState().wait_for_everyone()
    report: dict[str, Any] = {}
    ends = []
    for name, checkpoint in (("once", None), ("again", folder / "run" / "checkpoint-13")):
        rows = encode(load_parallel(data, "train"), corpus.tokenizer, data, filter=True)
        model = build_model(recipe, corpus.tokenizer, args)
        trainer = TranslationTrainer(model, args, corpus.tokenizer, train_dataset=rows, data=data)
        report[name] = record_batches(trainer)
        trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
        ends.append(trainer.model.state_dict())
    report["weights"] = all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])
    return report


def record_batches(trainer: TranslationTrainer) -> list[list[str]]:
    """Return a list to which the trainer appends the sentence pairs of each batch."""
    batches: list[list[str]] = []
    step, decode = trainer.training_step, trainer.processing_class.batch_decode

    def training_step(model: Any, inputs: dict[str, torch.Tensor], *rest: Any) -> torch.Tensor:
        sides = (inputs["input_ids"], inputs["labels"].clamp(min=1))  # 1 is padding
        batches.append(["\t".join(pair) for pair in zip(*(decode(ids, True) for ids in sides), strict=True)])
        return step(model, inputs, *rest)

    trainer.training_step = training_step
    return batches


def train_with_dropping(
    corpus: SimpleNamespace, folder: Path, family: str, **training: Any
) -> tuple[dict[str, torch.Tensor], list]:
    """Train four steps. Return the weights and the first twelve random draws: parts of dropout masks, and noise."""
    drawn: list = []
    noise, forward = layer_selection.gumbel_difference, Dropout.forward

    def recorded_noise(logits):
        drawn.append(noise(logits))
        return drawn[-1]

    def recorded_forward(self, x):
        ones = forward(self, torch.ones_like(x)) if self.training and self.p else None
        if ones is None:
            return x
        drawn.append(ones.flatten()[:32].ne(0))
        return x * ones

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layer_selection, "gumbel_difference", recorded_noise)
        patch.setattr(Dropout, "forward", recorded_forward)
        model = {**DROPPING[family], "dropout": 0.3}
        trainer = make_trainer(corpus, folder, family, model, max_steps=4, **training)
        trainer.train()
    return weights_of(trainer), [values.double().tolist() for values in drawn[:12]]


def evaluate(corpus: SimpleNamespace, folder: Path) -> dict[str, Any]:
    """Validate an odd number of sentences by loss and BLEU, translate one, and record this process's sources."""
    texts = load_parallel(tiny_recipe(folder).data, "validation").select(range(SENTENCES))
    recipe = tiny_recipe(folder, family="mat", **{**TRAINING, "predict_with_generate": True})
    args = recipe.training_arguments()
    trainer = TranslationTrainer(
        build_model(recipe, corpus.tokenizer, args).double(),
        args,
        corpus.tokenizer,
        eval_dataset=encode(texts, corpus.tokenizer, recipe.data, filter=False),
        eval_texts=texts,
        evaluation=recipe.evaluation,
        data=recipe.data,
    )
    translated: list[str] = []
    plain = translation_module.translate

    def recorded(model, tokenizer, sources, *rest, **languages):
        translated.extend(sources)
        return plain(model, tokenizer, sources, *rest, **languages)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(translation_module, "translate", recorded)
        metrics = trainer.evaluate()
    one = trainer.translate(texts["source"][:1], trainer.evaluation, "de", "en")
    scores = {name: metrics[name] for name in ("eval_loss", "eval_bleu")}
    return {**scores, "translated": translated, "one": one, "sources": texts["source"][:]}


def shard_on_cpus() -> None:
    """Make accelerate shard on CPUs. PyTorch can do it, but accelerate only shards on GPUs."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    PartialState._prepare_backend = lambda self, *_: ("gloo", DistributedType.MULTI_GPU)
    os.environ.pop("ACCELERATE_USE_CPU", None)  # the launcher sets it; accelerate shards nothing if it is set
    os.environ.update(
        ACCELERATE_TORCH_DEVICE="cpu",
        ACCELERATE_USE_FSDP="true",
        FSDP_VERSION="2",
        FSDP_AUTO_WRAP_POLICY="TRANSFORMER_BASED_WRAP",
        FSDP_STATE_DICT_TYPE="SHARDED_STATE_DICT",
        FSDP_RESHARD_AFTER_FORWARD="true",
        FSDP_CPU_RAM_EFFICIENT_LOADING="false",
    )


def put_aside(run: Path, last: str) -> None:
    """Move a run's last checkpoint, results and final model into another folder, so that the run is unfinished."""
    if PartialState().is_main_process:
        aside = run.with_name(f"{run.name}-before")
        aside.mkdir()
        for name in (last, "results.json", "model.safetensors"):
            (run / name).rename(aside / name)
    PartialState().wait_for_everyone()


def run_sharded_twice(run: Path) -> None:
    """Do a whole run with sharded weights. Put its end aside, and finish it again from the first checkpoint."""
    options = {**TRAINING, "max_steps": 8, "save_steps": 4, "average_last": 2, "gradient_norms": True}
    options |= {"eval_strategy": "steps", "eval_steps": 4, "predict_with_generate": True}
    recipe = tiny_recipe(run, family="latent_depth", model={**LATENT, "dropout": 0.1}, **options)
    run_recipe(recipe)
    put_aside(run, "checkpoint-8")
    with counted_updates() as made:
        run_recipe(recipe)
    assert made == [5, 6, 7, 8], made


SHORT = [*((family, where) for family in ("mat", "marian") for where in ("forward", "backward")), ("mat", "input")]
KINDS = ("pairs", "masked")


def run_of(kind: str, folder: Path, **training: Any) -> dict[str, Any]:
    """Do a whole run without random draws that differ between processes. Return its losses and counts.

    `pairs`: two language pairs, with temperature sampling and BPE-dropout. `masked`: a masked language model of two
    languages.
    """
    training = {**TRAINING, "max_steps": 6, "eval_strategy": "steps", "eval_steps": 6, "save_steps": 3, **training}
    if kind == "pairs":
        values = tiny_values(folder / "run", "mat", {"dropout": 0.0, "drop_branch": 0.0}, **training)
        values["data"] = {
            "format": "phrases", "pairs": ["de-en", "en-de"], "train_size": 150, "max_length": 128,
            "sampling_temperature": 5.0,
        }  # fmt: skip
        values["tokenizer"]["bpe_dropout"] = 0.2
        results = run_recipe(check_recipe(values, "tiny", "tiny.yaml"))
    else:
        phrases = load_parallel(tiny_recipe(folder).data, "train")
        if PartialState().is_main_process:
            folder.mkdir(parents=True, exist_ok=True)
            for side, lang in (("source", "de"), ("target", "en")):
                lines = phrases[side][: 150 if lang == "en" else 60]
                (folder / f"text.{lang}").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        PartialState().wait_for_everyone()
        values = tiny_values(folder / "run", "latent_depth", {**LATENT, "dropout": 0.0}, **training)
        for name in ("decoder_layers", "decoder_attention_heads", "decoder_ffn_dim", "latent_decoder"):
            values["model"].pop(name, None)
        values["data"] = {
            "root": str(folder), "languages": ["en", "de"], "train": "text", "validation": "text",
            "posteriors": "language", "max_length": 100, "sampling_temperature": 2.0,
        }  # fmt: skip
        del values["evaluation"]
        with pytest.MonkeyPatch.context() as patch:
            constant_noise(patch)
            results = run_masked_lm(check_recipe(values, "tiny", "tiny.yaml", MaskedLMRecipe))
    return {"validation": results["validation"], "tokens": results["train"]["target_tokens"]}


def main(out: Path) -> None:
    """Do all the work. The order does not matter, except that sharding comes last, because it cannot be undone."""
    hold_out_few(pytest.MonkeyPatch())  # as in the tests, which train on the same corpus
    leave_figures_blank(pytest.MonkeyPatch())
    gc.freeze()  # every trainer collects garbage; without this, each collection visits all imported objects
    corpus = tiny_corpus()
    rank = int(os.environ["RANK"])
    draws: dict[str, list] = {}
    for family in FAMILIES:
        keep(train_without_dropping(corpus, out / "runs" / family, family), out / f"two-{family}")
    for family in DROPPING:
        weights, draws[family] = train_with_dropping(corpus, out / "runs" / family, family)
        again, _ = train_with_dropping(corpus, out / "runs" / family, family)
        if rank == 0:
            save_file(weights, out / f"drop-{family}.safetensors")
            save_file(again, out / f"again-{family}.safetensors")
    for family in ("vanilla_transformer", "mat"):
        weights, _ = train_with_dropping(corpus, out / "runs" / family, family, gradient_checkpointing=True)
        if rank == 0:
            save_file(weights, out / f"recomputed-{family}.safetensors")
    report = {"draws": draws, "evaluation": evaluate(corpus, out / "runs" / "evaluate")}
    report["faults"] = keep_faults(corpus, out, "faults")
    report["short of memory"] = {
        f"{family}-{where}": train_short_of_memory(corpus, out / f"short-{family}-{where}", family, where)
        for family, where in SHORT
    }
    report["stream"] = stream_twice(corpus, out / "stream")
    report["runs"] = {kind: run_of(kind, out / kind) for kind in KINDS}

    shard_on_cpus()
    for family in FAMILIES:
        keep(train_without_dropping(corpus, out / "runs" / f"sharded-{family}", family), out / f"sharded-{family}")
    run_sharded_twice(out / "sharded")
    run_of("pairs", out / "sharded-pairs")
    put_aside(out / "sharded-pairs" / "run", "checkpoint-6")
    put_aside(out / "pairs" / "run", "checkpoint-6")
    report["refused"] = {"going on": refusal(lambda: run_of("pairs", out / "pairs"))}
    report["sharded-faults"] = keep_faults(corpus, out, "sharded-faults")
    dropping = {"layer_drop": 0.1}
    report["refused"]["layers"] = refusal(
        lambda: make_trainer(corpus, out / "runs" / "refused", "vanilla_transformer", dropping)
    )
    (out / f"report-{rank}.json").write_text(json.dumps(report), encoding="utf-8")


def refusal(action: Callable[[], Any]) -> str:
    """Run `action`, which must raise `UserError`, and return the error message."""
    with pytest.raises(UserError) as error:
        action()
    return str(error.value)


def go_on_alone(folder: Path) -> None:
    """Finish with one process, sharded, the sharded run that two processes began."""
    hold_out_few(pytest.MonkeyPatch())
    leave_figures_blank(pytest.MonkeyPatch())
    torch.distributed.init_process_group("gloo")
    shard_on_cpus()
    with counted_updates() as made:
        run_of("pairs", folder, gradient_accumulation_steps=2)
    assert made == [4, 5, 6], made


if __name__ == "__main__":
    torch.set_num_threads(1)
    task, where = sys.argv[1:]
    with leaving_process_group():
        {"main": main, "go_on_alone": go_on_alone}[task](Path(where))
