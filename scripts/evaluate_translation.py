"""Score a checkpoint or a file of translations, and test whether other systems differ from it.

A checkpoint (a folder or a Hub id of any encoder-decoder model) on a test set:

    python scripts/evaluate_translation.py --model runs/multi30k-mat \
        --source test_2016_flickr.en.gz --reference test_2016_flickr.de.gz \
        --translations mat.de.txt --output mat.json

A file of translations, one a line:

    python scripts/evaluate_translation.py --hypotheses mat.de.txt --reference test_2016_flickr.de.gz

Other systems against it, by paired bootstrap resampling and approximate randomisation; each is a file of
translations or a checkpoint folder (which needs --source):

    python scripts/evaluate_translation.py --hypotheses vanilla.de.txt --reference test_2016_flickr.de.gz \
        --compare mat.de.txt runs/multi30k-deep --source test_2016_flickr.en.gz --metrics bleu chrf

As the MAT paper scores IWSLT'14 (tokenised, lowercased, beam 5, length penalty 1.2):

    python scripts/evaluate_translation.py --model runs/iwslt14-mat \
        --source test.de.gz --reference test.en.gz --metrics multi_bleu --lowercase \
        --num_beams 5 --length_penalty 1.2

A multilingual checkpoint on all its pairs, each with its own files, and on average:

    python scripts/evaluate_translation.py --model runs/multi30k_en_xx --pairs en-de en-fr en-cs \
        --source 'test_2016_flickr.{source_lang}.gz' --reference 'test_2016_flickr.{target_lang}.gz' \
        --translations 'out.{pair}.txt' --output multilingual.json

or on one of them, with --source_lang en --target_lang de. Names of systems are filled in, too: the models that pruning
made of one are --model 'runs/pruned-{target_lang}'.

Where one language is on one side of all pairs, means of the directions out of it and into it are given, too. As papers
on OPUS-100 report them (BLEU_94, BLEU_4, win ratio against Zhang et al. 2020), of what a run has left behind:

    ZHANG=benchmarks/opus100_zhang2020.tsv
    python scripts/evaluate_translation.py --pairs $(cut -sf1 $ZHANG | tail -n +2) --win_ratio $ZHANG --metrics bleu \
        --hypotheses 'runs/opus100_m2m_dwlstm/translations.{pair}.txt' --average_languages de zh br te \
        --reference 'opus100/supervised/{sorted_pair}/opus.{sorted_pair}-test.{target_lang}'

Files are UTF-8 text; names that end in .gz are read compressed. Existing files are not overwritten without
--overwrite. `--help` lists every setting.
"""

import json
import re
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import version
from pathlib import Path

import torch
from transformers import (
    AutoModelForSeq2SeqLM,
    HfArgumentParser,
)

from hf_deepwide.data.arguments import fill_in, split_pair
from hf_deepwide.data.corpora import read_lines
from hf_deepwide.durable import check_output, is_same, write_whole
from hf_deepwide.errors import UserError, run_script
from hf_deepwide.evaluation.averages import ALL, group_means, groups, read_scores, win_ratio
from hf_deepwide.evaluation.metrics import build_metrics, check_parallel, score
from hf_deepwide.evaluation.significance import compare_to_baseline
from hf_deepwide.evaluation.translate import EvaluationArguments, translate
from hf_deepwide.loading import TOKENIZERS, load_model, load_tokenizer
from hf_deepwide.models.language_pairs import Languages

LOADED = ("config.json", "generation_config.json", "*.safetensors*", "results.json", *TOKENIZERS)  # of a checkpoint


@dataclass
class ScriptArguments:
    """What to score, and where to put the results."""

    reference: str = field(metadata={"help": "File of reference translations, one a line."})
    model: str | None = field(default=None, metadata={"help": "Checkpoint to score: a folder or a Hub id."})
    hypotheses: str | None = field(default=None, metadata={"help": "File of translations to score."})
    source: str | None = field(default=None, metadata={"help": "File of source sentences for checkpoints."})
    compare: list[str] = field(
        default_factory=list,
        metadata={"help": "Systems to test against the scored one: files of translations, checkpoint folders."},
    )
    output: str | None = field(default=None, metadata={"help": "JSON file for the results."})
    translations: str | None = field(default=None, metadata={"help": "File for the model's translations."})
    overwrite: bool = field(default=False, metadata={"help": "Replace existing output files."})
    seed: int = field(default=12345, metadata={"help": "Seed of the significance tests."})
    trials: int = field(default=10_000, metadata={"help": "Trials of the approximate randomisation."})
    source_lang: str | None = field(
        default=None,
        metadata={"help": "Source language, for multilingual models and tokenizers (NLLB, mBART, M2M100)."},
    )
    target_lang: str | None = field(
        default=None, metadata={"help": "Target language likewise; also what --tokenize auto goes by."}
    )
    pairs: list[str] = field(
        default_factory=list,
        metadata={
            "help": "Language pairs (en-de) to evaluate one after the other, and on average. They are filled in for "
            "{pair}, {source_lang}, {target_lang} and {sorted_pair} (de-en for en-de, too) in the names of files and "
            "systems."
        },
    )
    win_ratio: str | None = field(
        default=None,
        metadata={
            "help": "With --pairs: TSV table of others' scores, with the header pair and systems' names. Says on how "
            "many pairs the scored system is better, by the first of --metrics."
        },
    )
    device: str | None = field(default=None, metadata={"help": "Default: a GPU where there is one."})
    trust_remote_code: bool = field(default=False, metadata={"help": "Run model code from the checkpoint."})


def main() -> None:
    """Evaluate one language pair, or several and their average."""
    parser = HfArgumentParser((ScriptArguments, EvaluationArguments), description=__doc__.split("\n")[0])
    script, evaluation = parser.parse_args_into_dataclasses()
    if script.pairs:
        one_by_one = {pair: for_pair(script, pair) for pair in script.pairs}
        for one in one_by_one.values():
            check_arguments(one, evaluation)
        check_outputs(script, list(one_by_one.values()))
        check_summary(script, evaluation)
        reports = {}
        for pair, one in one_by_one.items():
            print(f"{pair}:")
            reports[pair] = evaluate(one, evaluation)
        report = {**summary(script, reports, evaluation), "pairs": reports}
    else:
        for option, value in (
            ("--win_ratio", script.win_ratio),
            ("--average_languages", evaluation.average_languages),
        ):
            if value:
                raise UserError(f"{option} is of several language pairs: name them with --pairs")
        check_arguments(script, evaluation)
        check_outputs(script, [script])
        report = evaluate(script, evaluation)
    if script.output:
        write_whole(Path(script.output), json.dumps(report, indent=2, ensure_ascii=False) + "\n")


def for_pair(script: ScriptArguments, pair: str) -> ScriptArguments:
    """The arguments with a language pair filled in."""
    if not re.fullmatch(r"\w+-\w[\w-]*", pair):  # it becomes part of the names of files
        raise UserError(f"--pairs: {pair!r} is no language pair; write source and target, as in en-de")
    source_lang, target_lang = split_pair(pair)
    names = ("model", "hypotheses", "source", "reference", "translations")
    files = {name: fill_in(getattr(script, name), pair, f"--{name}") for name in names}
    files["compare"] = [fill_in(system, pair, "--compare") for system in script.compare]
    if script.translations and len(script.pairs) > 1 and files["translations"] == script.translations:
        raise UserError("--translations: several pairs would write one file; put {pair} into its name")
    return replace(script, **files, source_lang=source_lang, target_lang=target_lang, output=None)


def summary(script: ScriptArguments, reports: dict[str, dict], evaluation: EvaluationArguments) -> dict[str, dict]:
    """Each system's mean scores over all language pairs and over groups of them, and win ratios; all are printed."""
    of_groups = groups(script.pairs, evaluation.average_languages)
    systems = [script.model or script.hypotheses, *script.compare]
    scores = {
        system: {pair: list(report["systems"].values())[place] for pair, report in reports.items()}
        for place, system in enumerate(systems)
    }
    by_group: dict[str, dict] = {name: {} for name in of_groups}
    for system, of_system in scores.items():
        of_system_means = group_means(of_system, evaluation.metrics, evaluation.average_languages)
        for name, means in of_system_means.items():
            by_group[name][system] = means
            print(f"{system}, {name} over {len(of_groups[name])} language pairs")
            for metric, mean in means.items():
                print(f"  {metric:<10} {mean:6.2f}")
    metric = evaluation.metrics[0]
    ours, *compared = ({pair: of_pair[metric] for pair, of_pair in of_system.items()} for of_system in scores.values())
    others = dict(zip(script.compare, compared, strict=True)) | others_scores(script)
    ratios = {other: win_ratio(ours, theirs, of_groups) for other, theirs in others.items()}
    for other, ratio in ratios.items():
        print(f"{systems[0]} against {other}, win ratio by {metric}")
        for name, percent in ratio.items():
            print(f"  {percent:6.2f} % of {len(of_groups[name])} language pairs, {name}")
    return {"average": by_group.pop(ALL), "groups": by_group, "win_ratio": ratios}


def others_scores(script: ScriptArguments) -> dict[str, dict[str, float]]:
    """What `--win_ratio` says of each system: its score for each pair."""
    return read_scores(existing(script.win_ratio)) if script.win_ratio else {}


def evaluate(script: ScriptArguments, evaluation: EvaluationArguments) -> dict:
    """Read all files, then translate, write translations, score and compare; what `--output` is to hold."""
    baseline = script.model or script.hypotheses
    references = lines_of(script.reference)
    translations: dict[str, list[str]] = {}
    for file in [*([script.hypotheses] if script.hypotheses else []), *script.compare]:
        if not Path(file).is_dir():
            translations[file] = lines_of(file)
            check_parallel(translations[file], references, (file, script.reference))
    if script.source:
        sources = lines_of(script.source)
        check_parallel(sources, references, (script.source, script.reference))

    scoring = {
        "lowercase": evaluation.lowercase,
        "tokenize": evaluation.tokenize,
        "target_lang": script.target_lang,
        "metrics": evaluation.metrics,
    }
    scores: dict[str, dict] = {}
    for system in (baseline, *script.compare):
        speed = {}
        if system not in translations:
            translations[system], seconds = translate_with(system, sources, script, evaluation)
            speed = {"seconds": seconds, "sentences_per_second": len(sources) / seconds}
            if system == script.model and script.translations:
                write_whole(Path(script.translations), "".join(f"{line}\n" for line in translations[system]))
        scores[system] = score(translations[system], references, **scoring) | speed
        print_scores(system, scores[system], evaluation.metrics)
    report = {
        "reference": script.reference,
        "source": script.source,
        "settings": asdict(evaluation),
        "hf_deepwide": version("hf_deepwide"),
        "systems": scores,
    }
    if script.compare:
        comparisons = compare_to_baseline(
            translations[baseline],
            {system: translations[system] for system in script.compare},
            references,
            samples=evaluation.bootstrap_samples,
            trials=script.trials,
            seed=script.seed,
            **scoring,
        )
        report |= {"baseline": baseline, "comparisons": comparisons}
        print_comparisons(baseline, comparisons)
    return report


def check_arguments(script: ScriptArguments, evaluation: EvaluationArguments) -> None:
    """Refuse what cannot work before anything is read, let alone translated."""
    if (script.model is None) == (script.hypotheses is None):
        raise UserError("give one of --model (a checkpoint) and --hypotheses (a file of translations)")
    if script.hypotheses and Path(script.hypotheses).is_dir():
        raise UserError(f"--hypotheses: {script.hypotheses} is a folder; a checkpoint is given by --model")
    if script.device is not None:
        try:
            torch.empty(0, device=script.device)
        except (RuntimeError, AssertionError) as error:  # the latter where torch was built without it
            raise UserError(f"--device {script.device}: {' '.join(str(error).split())}") from error
    if script.translations and not script.model:
        raise UserError("--translations is for what --model translates; --hypotheses is such a file already")
    checkpoints = [name for name in (script.model, *script.compare) if name and Path(name).is_dir()]
    if (script.model or checkpoints) and not script.source:
        raise UserError(f"{script.model or checkpoints[0]} is a checkpoint: give its input with --source FILE")
    systems = [script.model or script.hypotheses, *script.compare]
    twice = {name for name in systems if systems.count(name) > 1}
    if twice:
        raise UserError(f"--compare: {', '.join(sorted(twice))} is named twice")
    build_metrics(evaluation.metrics, tokenize=evaluation.tokenize, target_lang=script.target_lang)


def check_summary(script: ScriptArguments, evaluation: EvaluationArguments) -> None:
    """Refuse before anything is translated what could not be summed up in the end."""
    twice = {pair for pair in script.pairs if script.pairs.count(pair) > 1}
    if twice:
        raise UserError(f"--pairs: {', '.join(sorted(twice))} is named twice")
    of_groups = groups(script.pairs, evaluation.average_languages)
    for system, scores in others_scores(script).items():
        if system in script.compare:
            raise UserError(f"--win_ratio: {system} is named in --compare, too; rename one of the two")
        win_ratio(dict.fromkeys(script.pairs, 0.0), scores, of_groups)  # it has all pairs


def check_outputs(script: ScriptArguments, one_by_one: Sequence[ScriptArguments]) -> None:
    """Refuse before anything is translated a file that could not be written, or would be lost.

    What any of the language pairs reads is never written over, whatever it is called.
    """
    names = [(one.reference, one.source, one.hypotheses, one.model, *one.compare) for one in one_by_one]
    inputs = {Path(name) for of_pair in (*names, [script.win_ratio]) for name in of_pair if name}
    inputs |= {file for folder in inputs for pattern in LOADED for file in folder.glob(pattern) if folder.is_dir()}
    outputs = [("--translations", Path(one.translations)) for one in one_by_one if one.translations]
    outputs += [("--output", Path(script.output))] if script.output else []
    for number, (option, path) in enumerate(outputs):
        if not path.parent.is_dir():
            raise UserError(f"{option}: there is no folder {path.parent}; make it first")
        for _, other in outputs[:number]:
            if is_same(path, other):
                raise UserError(f"{other} and {path}, which are to be written, are the same file; give two names")
        try:
            check_output(path, inputs=inputs, overwrite=script.overwrite, option="--overwrite")
        except UserError as error:
            raise UserError(f"{option}: {error}") from None
        if path.is_dir():
            raise UserError(f"{option}: {path} is a folder; give the name of a file")


def lines_of(name: str) -> list[str]:
    """The lines of a text file, plain or `.gz`."""
    return list(read_lines(existing(name)))


def existing(name: str) -> Path:
    """A file that is there."""
    if not Path(name).is_file():
        raise UserError(f"there is no file {name}")
    return Path(name)


def translate_with(
    checkpoint: str, sources: Sequence[str], script: ScriptArguments, evaluation: EvaluationArguments
) -> tuple[list[str], float]:
    """Load a checkpoint and translate with it; returns the translations, and the seconds that translating took."""
    trust = {"trust_remote_code": script.trust_remote_code}
    # float32, whatever the checkpoint was saved in: lower precision is the autocast of --precision
    model = load_model(AutoModelForSeq2SeqLM, checkpoint, dtype=torch.float32, **trust)
    tokenizer = load_tokenizer(checkpoint, **trust)
    if len(tokenizer) > (embeddings := model.get_input_embeddings().num_embeddings):
        raise UserError(
            f"{checkpoint}: its tokenizer has {len(tokenizer)} entries and its model {embeddings} embeddings"
        )
    known = Languages(model.config, model.generation_config, tokenizer)
    if script.source_lang and not script.pairs and not known.several:
        raise UserError(f"--source_lang {script.source_lang}: this checkpoint's tokenizer has no language codes")
    languages = {"source_lang": script.source_lang, "target_lang": script.target_lang} if known.several else {}
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else "cpu"
    start = time.perf_counter()
    translations = translate(model, tokenizer, sources, evaluation, script.device or accelerator, **languages)
    return translations, time.perf_counter() - start


def print_scores(system: str, scores: dict, metrics: Sequence[str]) -> None:
    """One line a metric, with the signature."""
    print(f"{system} ({scores['sentences']} sentences)")
    for name in metrics:
        print(f"  {name:<10} {scores[name]:6.2f}   {scores['signature'][name]}")
    if "seconds" in scores:
        print(f"  {'translated':<10} {scores['sentences_per_second']:6.2f} sentences a second")


def print_comparisons(baseline: str, comparisons: dict[str, dict]) -> None:
    """One line a system and metric: how far from the baseline, and how likely by chance."""
    for system, by_metric in comparisons.items():
        print(f"{system} against {baseline}")
        for name, result in by_metric.items():
            print(
                f"  {name:<10} {result['difference']:+6.2f}   p = {result['p_bootstrap']:.4f} (bootstrap), "
                f"{result['p_randomization']:.4f} (randomisation)"
            )


if __name__ == "__main__":
    run_script(main)
