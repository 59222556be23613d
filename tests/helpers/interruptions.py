"""Runs of the training script that are interrupted at a named moment, by a signal or a full disk.

Shared by the tests and by `benchmarks/resume_matrix.py`.

Started as a program, this module is a server. It imports everything once and forks a child for each process of a run,
so that a run takes seconds. `Runs` is its client. A child patches a function, so that the n-th call sends the signal.
"""

import gc
import importlib
import json
import os
import resource
import runpy
import signal
import socket
import subprocess
import sys
import time
import traceback
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
import yaml
from tiny_run import ENVIRONMENT, SCRIPT, leave_figures_blank, tiny_values

from hf_deepwide.data.phrases import build_phrases
from hf_deepwide.training.preemption import SIGNALS

GRACE = 120  # seconds that a launcher gives the other processes after one failed; torchrun's default is 30

# moment: (module, function, when, file name). "before" and "after" are relative to the call. In a "before" row with a
# file name, only calls for a path of that name count. "half": the file that the call wrote (its last path argument, or
# the named file in that folder) is cut to half its size. A "half" `rmtree` deletes the named file, and nothing else.
MOMENTS = {
    "in a step": ("transformers.trainer", "Trainer.training_step", "before", ""),
    "in evaluation": ("transformers.trainer_callback", "CallbackHandler.on_prediction_step", "after", ""),
    "in generation": ("hf_deepwide.training.translation", "translate", "after", ""),
    "between epochs": ("hf_deepwide.training.callbacks", "EpochCallback.on_epoch_begin", "after", ""),
    "weights half written": ("hf_deepwide.training.trainer", "TokenBatchTrainer._save", "half", "model.safetensors"),
    "optimizer half written": ("torch", "save", "half", ""),
    "checkpoint not yet named": ("hf_deepwide.training.saving", "publish", "before", ""),
    "checkpoint just named": ("hf_deepwide.training.saving", "publish", "after", ""),
    "old checkpoint half deleted": ("hf_deepwide.durable", "shutil.rmtree", "half", "model.safetensors"),
    "mark not yet named": ("hf_deepwide.durable", "publish", "before", "run.json"),
    "recipe not yet named": ("hf_deepwide.durable", "publish", "before", "recipe.yaml"),
    "tokenizer not yet named": ("hf_deepwide.durable", "publish", "before", "tokenizer_config.json"),
    "checksums not yet named": ("hf_deepwide.durable", "publish", "before", "checksums.json"),
    "final model not yet named": ("hf_deepwide.durable", "publish", "before", "model.safetensors"),
    "results not yet named": ("hf_deepwide.durable", "publish", "before", "results.json"),
    "test set translated": ("hf_deepwide.runs.translation", "translate_and_score", "after", ""),
    "model card half written": ("hf_deepwide.runs.translation", "write_model_card", "half", "README.md"),
    "tokenizer half written": ("transformers", "PreTrainedTokenizerBase.save_pretrained", "half", "tokenizer.json"),
}


FULL = 0  # in place of a signal's number: from now on, no file can grow beyond LARGEST, as on a full disk
LARGEST = 60_000  # bytes; more than the log, less than the weights


@dataclass
class Blow:
    """A signal to one process, at a moment's `count`-th time. When the process fails, the others get SIGTERM."""

    moment: str
    count: int = 1
    rank: int = 0
    number: int = signal.SIGKILL
    to_group: bool = False  # also to the process's workers, as schedulers do


class Runs(AbstractContextManager):
    """A client of the server: it runs the training script in the server's children."""

    def __enter__(self) -> "Runs":
        """Start the server."""
        environment = {**ENVIRONMENT, "TOKENIZERS_PARALLELISM": "false"}
        self.server = subprocess.Popen(
            [sys.executable, __file__], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        return self

    def __exit__(self, *exception: object) -> None:
        self.server.stdin.close()
        self.server.wait()

    def run(
        self, recipe: Path, *, processes: int = 1, blow: Blow | None = None, after: float | None = None
    ) -> tuple[list[int], str]:
        """Run a recipe to its end, or to `blow`, or kill it `after` seconds after its folder has a `recipe.yaml`.

        Returns:
            The exit status of each process (negative: the signal that killed it), and the output of all processes in
            the order of writing.
        """
        job = {"recipe": str(recipe), "processes": processes, "blow": blow and asdict(blow), "after": after}
        print(json.dumps(job), file=self.server.stdin, flush=True)
        answer = json.loads(self.server.stdout.readline())
        return answer["codes"], answer["output"]


def serve() -> None:
    """Read jobs from the standard input, one per line, perform them, and print their results."""
    for module in ("hf_deepwide.runs.run", *(where for where, *_ in MOMENTS.values())):
        importlib.import_module(module)
    sys.path.insert(0, str(SCRIPT.parent))
    leave_figures_blank(pytest.MonkeyPatch())
    gc.freeze()  # a child's garbage collector skips the imported objects, so their memory is not copied
    for line in sys.stdin:
        print(json.dumps(_perform(json.loads(line))), flush=True)


def _perform(job: dict[str, Any]) -> dict[str, Any]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = Path(job["recipe"]).with_suffix(".log")
    log.write_bytes(b"")
    children = {}
    for rank in range(job["processes"]):
        child = os.fork()
        if child == 0:
            os._exit(_child(job, rank, port, log))
        children[child] = rank
    codes, ended, told = {}, None, False
    start = None
    while children:
        for child in list(children):
            pid, status = os.waitpid(child, os.WNOHANG)
            if pid:
                codes[children.pop(child)] = os.waitstatus_to_exitcode(status)
                ended = ended or (time.monotonic() if codes and max(map(abs, codes.values())) else None)
        if job["after"] is not None:
            opened = (log.with_suffix("") / "recipe.yaml").is_file()
            start = start or (time.monotonic() if opened else None)
            if start and time.monotonic() - start >= job["after"]:
                _signal(children, signal.SIGKILL)
        if ended and not told:
            _signal(children, signal.SIGTERM)
            told = True
        if ended and time.monotonic() - ended > GRACE:
            _signal(children, signal.SIGKILL)
        time.sleep(0.01)
    output = log.read_text(encoding="utf-8", errors="replace")
    return {"codes": [codes[rank] for rank in sorted(codes)], "output": output}


def _signal(children: dict[int, int], number: int) -> None:
    for child in children:
        os.killpg(child, number)


def _child(job: dict[str, Any], rank: int, port: int, log: Path) -> int:
    os.setpgid(0, 0)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell makes its background commands ignore SIGINT
    with log.open("ab", buffering=0) as out:
        os.dup2(out.fileno(), 1)
        os.dup2(out.fileno(), 2)
    if job["processes"] > 1:
        os.environ |= {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(job["processes"]),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
    if job["blow"] and job["blow"]["rank"] == rank:
        arm(Blow(**job["blow"]))
    sys.argv = [str(SCRIPT), job["recipe"]]
    code = 0
    try:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    except SystemExit as end:
        code = end.code or 0
    except BaseException:
        traceback.print_exc()
        code = 1
    if code in (0, *(128 + number for number in SIGNALS)) and dist.is_initialized():
        print("the process ended in good order, but did not leave its group")
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    return code


def arm(blow: Blow) -> None:
    """Patch the function of the blow's moment, so that its `count`-th call strikes."""
    module, name, when, part = MOMENTS[blow.moment]
    *path, attribute = name.split(".")
    owner = importlib.import_module(module)
    for step in path:
        owner = getattr(owner, step)
    original = getattr(owner, attribute)
    calls = 0

    def patched(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        if when == "half" and attribute == "rmtree" and not (Path(args[0]) / part).is_file():
            return original(*args, **kwargs)  # not a checkpoint
        if when == "before" and part and Path(args[-1]).name != part:
            return original(*args, **kwargs)
        calls += 1
        if calls != blow.count:
            return original(*args, **kwargs)
        if when == "half" and attribute == "rmtree":
            (Path(args[0]) / part).unlink()
            return strike(blow)
        if when == "before":
            strike(blow)
        result = original(*args, **kwargs)
        if when == "half":
            (where,) = [Path(each) for each in args if isinstance(each, (str, Path))][-1:]
            file = where / part if part else where
            os.truncate(file, file.stat().st_size // 2)
        if when != "before":
            strike(blow)
        return result

    setattr(owner, attribute, patched)


def strike(blow: Blow) -> None:
    """Send the signal to this process or its group, or limit the size of files (`FULL`)."""
    if blow.number == FULL:
        resource.setrlimit(resource.RLIMIT_FSIZE, (LARGEST, resource.RLIM_INFINITY))
    elif blow.to_group:
        # Sent by another process, because a worker ends at a signal from its parent, and ignores other senders.
        sent = f"import os; os.killpg({os.getpgrp()}, {blow.number})"
        subprocess.run([sys.executable, "-c", sent], start_new_session=True, check=True)
    else:
        os.kill(os.getpid(), blow.number)


def write_case(
    folder: Path,
    name: str,
    *,
    data: dict | None = None,
    tokenizer: dict | None = None,
    processes: int = 1,
    **training: Any,
) -> tuple[Path, Path]:
    """Write a recipe `folder/name.yaml` for a run in `folder/name`, and return both paths.

    The run has 20 steps, and evaluates and saves every 4 steps. The corpus is written beside the recipe, if it is not
    there yet.
    """
    if not (folder / "train.tsv").is_file():
        splits = build_phrases("de", "en", train_size=150)
        for split, size in (("train", 150), ("validation", 24), ("test", 16)):
            rows = splits[split].select(range(size))
            lines = (f"{source}\t{target}\n" for source, target in zip(rows["source"], rows["target"], strict=True))
            (folder / f"{split}.tsv").write_text("".join(lines), encoding="utf-8")
    run, options = folder / name, {"save_total_limit": 2, "predict_with_generate": True, **training}
    values = tiny_values(run, **options)
    files = {split: f"{split}.tsv" for split in ("train", "validation", "test")}
    languages = {"source_lang": "de", "target_lang": "en"}
    values["data"] = {"format": "tsv", "root": str(folder), **languages, **files, "max_length": 128, **(data or {})}
    values["tokenizer"] = {**values["tokenizer"], **(tokenizer or {})}
    recipe = folder / f"{name}.yaml"
    recipe.write_text(yaml.safe_dump(values), encoding="utf-8")
    return recipe, run


def difference(run: Path, reference: Path) -> list[str]:
    """List what differs, bit for bit, between two finished runs: checkpoint files, history, model, translations."""
    names = sorted(path.name for path in reference.glob("checkpoint-*"))
    ours = sorted(path.name for path in run.glob("checkpoint-*"))
    if names != ours:
        return [f"checkpoints {ours} instead of {names}"]
    files = ["model.safetensors", "config.json", "tokenizer.json", "translations.txt"]
    for name in names:
        files += [f"{name}/{path.name}" for path in sorted((reference / name).iterdir()) if path.suffix != ".json"]
    found = [
        name
        for name in files
        if "training_args" not in name and (run / name).read_bytes() != (reference / name).read_bytes()
    ]
    last = names[-1]
    return found + [f"{last}: {each}" for each in _unlike(_history(run / last), _history(reference / last))]


def _history(checkpoint: Path) -> list[dict]:
    return json.loads((checkpoint / "trainer_state.json").read_text(encoding="utf-8"))["log_history"]


def _unlike(ours: list[dict], theirs: list[dict]) -> list[str]:
    if len(ours) != len(theirs):
        return ["log_history has another length"]
    compared = ("step", "epoch", "loss", "grad_norm", "learning_rate", "eval_loss", "eval_bleu")
    return [
        f"{key} of step {b['step']}: {a.get(key)} instead of {b.get(key)}"
        for a, b in zip(ours, theirs, strict=True)
        for key in compared
        if a.get(key) != b.get(key)
    ]


if __name__ == "__main__":
    serve()
