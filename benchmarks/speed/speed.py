"""Answer a question about speed: time systems in turns, and report the ratios of their times.

    python benchmarks/speed/speed.py marian
    python benchmarks/speed/speed.py depthwise_lstm --threads 1 --rounds 5 --output benchmarks/results/speed

questions.py lists the questions. Each system has the attention that is faster with a task's precision on the device,
as in training by default. The report also has the operations of the forward pass for a target token, as PyTorch counts
them. Their ratio would be the ratio of the times if only matrix products took time. Unless a system is Marian, the
report has the memory that a training step keeps for its backward pass, weights not counted. On a GPU it has the peak
memory of each task. Close other programs before you measure.

A long question can be answered in slices: `--tasks training` measures only the tasks whose title contains one of the
given words, and keeps the other tasks of an existing report.

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
    """A model with random weights, and the attention that is fastest with the task's precision on the device."""
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
    """Bytes that the forward pass of a training step keeps for the backward pass, weights not counted."""
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
    """The question with only the tasks whose title contains one of `words`; None keeps all tasks.

    Raises:
        UserError: no title contains one of the words.
    """
    tasks = tuple(task for task in question.tasks if words is None or any(word in task.title for word in words))
    if not tasks:
        titles = "; ".join(task.title for task in question.tasks)
        raise UserError(f"--tasks: {', '.join(words)} is in no title of this question's tasks: {titles}")
    return dataclasses.replace(question, tasks=tasks)


def answer(question: Question, rounds: int, device: str, earlier: Path | None = None) -> dict[str, Any]:
    """Measure every task. Other tasks of an `earlier` report are kept: it must have the same systems and machine."""
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
