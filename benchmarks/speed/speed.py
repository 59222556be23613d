"""Answer a question about speed: systems side by side, in turns, as ratios.

    python benchmarks/speed/speed.py marian
    python benchmarks/speed/speed.py depthwise_lstm --threads 1 --rounds 5 --output benchmarks/results/speed

questions.py lists the questions. Each system has the attention that is faster with a task's precision on the device,
as training has by default. Beside the times stand the operations that a target token costs, forward, as PyTorch counts
them: what the ratio would be if only matrix products took time. So stands the memory of what a training step keeps for
its backward pass, weights aside. On a GPU the report has the most memory that each task needed. Close other programs.

A long question can be answered in slices: `--tasks training` takes the tasks whose title holds one of the words, and
keeps the other tasks of the report that is there.

    python benchmarks/speed/speed.py joints --tasks training --output benchmarks/results/speed
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from harness import against, options, parsed, peak_memory, take_turns
from questions import QUESTIONS, Question
from reports import begun, markdown_table, measured_on, write_report
from tasks import Decoding, Training, our_loss, training_batch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForSeq2SeqLM, MarianConfig, PreTrainedConfig, PreTrainedModel, set_seed

from hf_deepwide.errors import UserError, run_script


def build(config: PreTrainedConfig, task: Training | Decoding, device: str) -> PreTrainedModel:
    """A model with random weights, and the attention that is the fastest here."""
    matrix_products = device == "cpu" and task.precision == "bfloat16"
    attention = "eager" if matrix_products else "sdpa"
    with torch.device(device):
        return AutoModelForSeq2SeqLM.from_config(config, attn_implementation=attention)


def operations(config: PreTrainedConfig) -> float:
    """Floating-point operations of the forward pass for each target token."""
    model = AutoModelForSeq2SeqLM.from_config(config, attn_implementation="eager").eval()
    batch = training_batch(model, 4, 32, "cpu")
    labels = batch.pop("labels")
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(**batch, decoder_input_ids=labels, use_cache=False)
    return counter.get_total_flops() / labels.numel()


def memory(config: PreTrainedConfig) -> int:
    """Bytes that the forward pass of a training step keeps for the backward pass, beside the weights."""
    model = AutoModelForSeq2SeqLM.from_config(config, attn_implementation="sdpa").train()
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = our_loss(model, training_batch(model, 4, 32, "cpu"))
    assert loss.requires_grad, "it holds what was kept, so that no address was used twice"
    return sum(kept.values())


def chosen(question: Question, words: Sequence[str] | None) -> Question:
    """The question with the tasks whose title holds one of the words; None: with all.

    Raises:
        UserError: no title does.
    """
    tasks = tuple(task for task in question.tasks if words is None or any(word in task.title for word in words))
    if not tasks:
        titles = "; ".join(task.title for task in question.tasks)
        raise UserError(f"--tasks: {', '.join(words)} is in no title of this question's tasks: {titles}")
    return dataclasses.replace(question, tasks=tasks)


def answer(question: Question, rounds: int, device: str, earlier: Path | None = None) -> dict[str, Any]:
    """Measure every task; an `earlier` report of the same systems on the same machine keeps its other tasks."""
    systems = question.systems
    counted = {name: operations(config) for name, config in systems.items()}
    are_ours = not any(isinstance(config, MarianConfig) for config in systems.values())
    kept = {name: memory(config) for name, config in systems.items()} if are_ours else {}
    sizes = {name: AutoModelForSeq2SeqLM.from_config(config).num_parameters() for name, config in systems.items()}
    about = {
        "question": question.title,
        "yardstick": question.yardstick,
        **measured_on(device),
        "rounds": rounds,
        "systems": {
            name: {"parameters": sizes[name], "operations": counted[name] / counted[question.yardstick]}
            | ({"memory": kept[name] / kept[question.yardstick]} if kept else {})
            for name in systems
        },
    }
    report = begun(earlier, about, tasks={})
    for task in question.tasks:
        set_seed(0)
        steps, peaks = {}, {}
        for name, config in systems.items():
            others = torch.cuda.memory_allocated()  # 0 where there is no GPU
            steps[name] = task.step(build(config, task, device), device)
            if device == "cuda":
                peaks[name] = peak_memory(steps[name]) - others
        measured = against(take_turns(steps, rounds), question.yardstick)
        report["tasks"][task.title] = {
            name: {"tokens_per_second": task.tokens / each.seconds, "time": each.ratio}
            | ({"peak_memory_bytes": peaks[name]} if peaks else {})
            for name, each in measured.items()
        }
        for name, each in measured.items():
            print(f"{task.title:<38} {name:<44} {task.tokens / each.seconds:9.0f} tokens/s {each.ratio:6.2f} x time")
    return report


def table(report: dict[str, Any]) -> str:
    """The report as Markdown."""
    tasks, has_memory = report["tasks"], all("memory" in system for system in report["systems"].values())
    head = ["system", "parameters", "operations", *(["memory"] if has_memory else []), *tasks]
    of_gpu = [title for title, rows in tasks.items() if all("peak_memory_bytes" in row for row in rows.values())]
    head += [f"GiB, {title}" for title in of_gpu]
    rows = []
    for name, system in report["systems"].items():
        times = (f"{rows[name]['time']:.2f}" for rows in tasks.values())
        memory = [f"{system['memory']:.2f}"] if has_memory else []
        peaks = (f"{tasks[title][name]['peak_memory_bytes'] / 2**30:.2f}" for title in of_gpu)
        size, operations = f"{system['parameters'] / 1e6:.2f} M", f"{system['operations']:.2f}"
        rows.append((name, size, operations, *memory, *times, *peaks))
    return (
        f"# {report['question']}\n\n"
        f"Time by that of {report['yardstick']}, for equal work: medians of {report['rounds']} interleaved rounds. "
        f"{report['machine']}, {report['threads']} threads, torch {report['torch']}.\n\n"
    ) + markdown_table(head, rows)


def main() -> None:
    """Measure, print, write."""
    parser = options(__doc__, 7, "folder for QUESTION.json and QUESTION.md")
    parser.add_argument("question", help=f"one of {', '.join(QUESTIONS)}")
    parser.add_argument("--tasks", nargs="+", help="only those whose title holds one of these words")
    args = parsed(parser)
    if args.question not in QUESTIONS:
        raise UserError(f"there is no question {args.question!r}; accepted: {', '.join(QUESTIONS)}")
    question = chosen(QUESTIONS[args.question], args.tasks)
    place = args.output / args.question if args.output else None
    device = "cuda" if torch.cuda.is_available() else "cpu"
    report = answer(question, args.rounds, device, earlier=place if args.tasks else None)
    if place:
        write_report(place, report, table)


if __name__ == "__main__":
    run_script(main)
