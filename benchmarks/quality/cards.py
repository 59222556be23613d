"""The model cards of a study: one a system, from the results that were kept; no sentence of the corpus is in them.

A card is that of the run of the study's first seed, with what all seeds say added. A study without `corpus`, which
says what the data are and under which licence, has no cards.
"""

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kept_runs import PRUNED, chosen, load_results
from report import TITLES, p_value, page, seeds_of, with_error

from hf_deepwide.training.model_card import card_of_results

if TYPE_CHECKING:
    from study import Study


def write_cards(study: "Study", results: Path, folder: Path) -> None:
    """Write the card of each system that has results."""
    for name, card in model_cards(study, results).items():
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(card, encoding="utf-8")


def model_cards(study: "Study", results: Path) -> dict[str, str]:
    """Name of the file to card, in Markdown."""
    if study.corpus is None:
        return {}
    everything = load_results(study, results)
    _, rows = chosen(study, everything)
    summary, _ = page(study, results, everything)
    cards = {}
    for system in study.systems:
        if system.name in summary:
            name = f"quality_{study.name}_{system.name}"
            card = card_of_results(rows[system.name][study.seeds[0]], name)
            for place, text in (
                (r"(?<=```\n)(?=\n## Scores)", made_by(study, system.name)),
                (r"(?<=## Scores\n\n)", scores(study, system.name, summary)),
                (r"(?=## Training\n)", f"## Data\n\n{study.corpus.strip()}\n\n"),
                (r"(?<=## Training\n\n)", training(study, summary[system.name], rows[system.name][study.seeds[0]])),
                (
                    r"Its licence is for whoever.*\Z",
                    "Before it is used or passed on, see the licence of the data above.\n",
                ),
            ):
                card, places = re.subn(place, lambda _, text=text: text, card, count=1, flags=re.DOTALL)
                if not places:
                    raise RuntimeError(f"the template of model cards has changed: there is no {place} in it")
            cards[f"{name}.md"] = card
    return cards


def made_by(study: "Study", system: str) -> str:
    """Where the model comes from, as no weights lie beside the card."""
    return (
        "\nIt is not published; this trains and scores it, and the baseline that it is compared with:\n\n"
        f"```\npython benchmarks/quality/study.py benchmarks/quality/{study.name}.yaml "
        f"--systems {' '.join(dict.fromkeys([study.baseline, system]))} --results my_results\n```\n"
    )


def scores(study: "Study", system: str, summary: dict[str, dict[str, Any]]) -> str:
    """Over seeds: of the system, of what pruning leaves of it, and of the baseline."""
    lines = [
        f"| {seeds_of(summary[system]['seeds'])} | parameters | {TITLES[study.metric]} | p | chrF | p |",
        "|---|---|---|---|---|---|",
    ]
    names = [system, f"{PRUNED}{system}", study.baseline]
    for name in dict.fromkeys(name for name in names if name in summary):
        row = summary[name]
        title = row["title"]
        if "layers" in row:
            title += f" to {', '.join('{encoder} + {decoder}'.format(**each) for each in row['layers'])} layers"
        cells = [title, f"{row['parameters'] / 1e6:.2f} M"]
        for metric in (study.metric, "chrf"):
            cells += [with_error(row[metric]), p_value(row, metric)]
        lines.append(f"| {' | '.join(cells)} |")
    baseline = summary[study.baseline]["title"] if study.baseline in summary else study.baseline
    return (
        "Mean and standard error over seeds: what another training would change. p is of approximate randomisation "
        f"against the baseline, {baseline}, a sentence's translations of all seeds together: whether these trained "
        "models differ on such sentences.\n\n" + "\n".join(lines) + f"\n\nThe model of seed {study.seeds[0]}:\n\n"
    )


def training(study: "Study", row: dict[str, Any], run: dict[str, Any]) -> str:
    """How the setting was found, and of the run of the first seed what its own report leaves out."""
    setting = ", ".join(f"{name} {value:g}" for name, value in row["setting"].items())
    return (
        f"Setting: {setting}, the best in validation loss of the {row['settings_tried']} (of {len(study.search)}) "
        f"that were tried with seed {study.seeds[0]}.\n"
        f"Of {seeds_of(row['seeds'])}: validation loss {with_error(row['validation_loss'])} "
        f"(nats a token, label-smoothed).\n\nThe model of seed {study.seeds[0]}, with other runs beside it, generates "
        f"{run['generation']['sentences_per_second']:.1f} sentences a second; its training, in "
        f"{run['train']['peak_memory_bytes'] / 2**30:.1f} GiB at most:\n\n"
    )
