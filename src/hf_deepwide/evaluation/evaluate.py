"""Score a checkpoint or a file of translations, and test whether other systems differ from it."""

import json
import logging
import re
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..checkpoint_files import ADAPTER_CONFIG, CONFIG, CTRANSLATE2
from ..data.arguments import fill_in, split_pair
from ..data.text_files import read_lines
from ..durable import check_output_file, is_same, write_whole
from ..errors import UserError, number_of, prefixed, quote
from ..hub import is_on_hub
from ..limits import Range, check_numbers
from ..loading import TOKENIZERS, check_checkpoint
from ..models.language_pairs import Languages
from .arguments import SEARCH, EvaluationArguments, own_search, settings_apart
from .averages import ALL, group_means, groups, read_scores, win_ratio
from .checkpoint import device_of, load_any_translator
from .engine import Engine, is_engine
from .metrics import build_metrics, check_parallel, score
from .significance import compare_systems, p_value, signed
from .translate import translate

logger = logging.getLogger(__name__)

# The files of a checkpoint, an adapter, or an exported folder, which must not be overwritten.
LOADED = (CONFIG, ADAPTER_CONFIG, CTRANSLATE2, "generation_config.json", "*.safetensors*", "results.json", *TOKENIZERS)
RANGES = {"seed": Range(1, 2**32, excludes_most=True), "trials": Range(1, 10_000_000)}  # of the significance tests


@dataclass
class Request:
    """The systems to score and compare, and the files for the results.

    Args:
        reference: file of reference translations, one on each line.
        model: checkpoint to score, a folder or a Hub id.
        hypotheses: file of translations to score.
        source: file of source sentences, for checkpoints.
        compare: systems to compare with the scored system: files of translations, or checkpoints (folders, or
            Hub ids).
        output: JSON file for the results.
        translations: file for the model's translations.
        overwrite: replace existing output files.
        seed: seed of the significance tests.
        trials: trials of the approximate randomisation.
        source_lang, target_lang: languages for multilingual models and tokenizers. The metric's tokenizer may depend
            on the target language.
        pairs: language pairs (en-de) to evaluate one after the other, and on average. They are filled in for {pair},
            {source_lang}, {target_lang} and {sorted_pair} (de-en for en-de, too) in the names of files and systems.
        win_ratio: TSV table with reported scores of other systems; its header is `pair` and the names of systems. It
            needs `pairs`. The result is the percentage of pairs on which the scored system is better by the first
            metric.
        device: the device to compute on. None: a GPU if there is one.
        trust_remote_code: run model code from the checkpoint.
        own_search: names of search settings that each checkpoint's own configs decide, instead of `evaluation`.
    """

    reference: str
    model: str | None = None
    hypotheses: str | None = None
    source: str | None = None
    compare: list[str] = field(default_factory=list)
    output: str | None = None
    translations: str | None = None
    overwrite: bool = False
    seed: int = 12345
    trials: int = 10_000
    source_lang: str | None = None
    target_lang: str | None = None
    pairs: list[str] = field(default_factory=list)
    win_ratio: str | None = None
    device: str | None = None
    trust_remote_code: bool = False
    own_search: Sequence[str] = ()

    @property
    def system(self) -> str:
        """The scored system: a checkpoint, or a file of translations. Without either, an empty string."""
        return self.model or self.hypotheses or ""


def evaluate(request: Request, evaluation: EvaluationArguments) -> dict:
    """Score and compare systems on one language pair, or on several pairs and their average. Print the results.

    Returns:
        The report, which is also written to the request's `output`.

    Raises:
        UserError: the request cannot be fulfilled. The error comes before anything is translated or written, unless
            only loading a later checkpoint reveals it (its weights, or its languages).
    """
    if request.pairs:
        for option, named in (("--source_lang", request.source_lang), ("--target_lang", request.target_lang)):
            if named:
                raise UserError(f"{option} {quote(named)}: --pairs names the languages; leave {option} out")
        one_by_one = {pair: for_pair(request, pair) for pair in request.pairs}
        for one in one_by_one.values():
            check_arguments(one, evaluation)
        check_outputs(request, list(one_by_one.values()))
        check_summary(request, evaluation)
        check_texts(one_by_one)
        texts = [read_texts(one) for one in one_by_one.values()]
        checkpoints, reports = Checkpoints(list(one_by_one.values()), texts), {}
        for (pair, one), pair_texts in zip(one_by_one.items(), texts, strict=True):
            print(f"{pair}:")
            reports[pair] = evaluate_pair(one, evaluation, pair_texts, checkpoints)
        warn_of_searches(reports.values())
        report = {**summary(request, reports, evaluation), "pairs": reports}
    else:
        for option, value in (
            ("--win_ratio", request.win_ratio),
            ("--average_languages", evaluation.average_languages),
        ):
            if value:
                raise UserError(f"{option} needs several language pairs; name them with --pairs")
        check_arguments(request, evaluation)
        check_outputs(request, [request])
        text = read_texts(request)
        report = evaluate_pair(request, evaluation, text, Checkpoints([request], [text]))
        warn_of_searches([report])
    if request.output:
        write_whole(Path(request.output), json.dumps(report, indent=2, ensure_ascii=False) + "\n")
    return report


def warn_of_searches(reports: Iterable[dict[str, Any]]) -> None:
    """Warn, once for all pairs, if a compared checkpoint used other search settings than the first checkpoint."""
    warnings: dict[tuple[str, str, str], None] = {}
    for report in reports:
        searches = [(name, each["search"]) for name, each in report["systems"].items() if "search" in each]
        for name, theirs in searches[1:]:
            first, ours = searches[0]
            if apart := settings_apart(ours, theirs, SEARCH):
                warnings[first, name, ", ".join(apart)] = None
    for found in warnings:
        logger.warning("%s and %s were translated with different settings: %s", *found)


def for_pair(request: Request, pair: str) -> Request:
    """Return the request for one language pair, with the pair filled into the names of files and systems."""
    if not re.fullmatch(r"\w+-\w[\w-]*", pair):  # the pair becomes part of file names
        raise UserError(f"--pairs: {quote(pair)} is no language pair; write source and target, as in en-de")
    source_lang, target_lang = split_pair(pair)
    names = ("model", "hypotheses", "source", "reference", "translations")
    files: dict[str, Any] = {name: fill_in(getattr(request, name), pair, f"--{name}") for name in names}
    files["compare"] = [fill_in(system, pair, "--compare") for system in request.compare]
    if request.translations and len(request.pairs) > 1 and files["translations"] == request.translations:
        raise UserError("--translations: several pairs would write one file; put {pair} into its name")
    return replace(request, **files, source_lang=source_lang, target_lang=target_lang, output=None)


def check_texts(one_by_one: Mapping[str, Request]) -> None:
    """Refuse a file that is given as the text of two languages, or as the translations of two language pairs."""
    for name, side in (("source", 0), ("reference", 1)):
        languages: dict[str, str] = {}
        for pair, one in one_by_one.items():
            file, language = getattr(one, name), split_pair(pair)[side]
            if file and (other := languages.setdefault(file, language)) != language:
                raise UserError(
                    f"--{name}: {file} would be the text of several languages ({other}, {language}); put "
                    f"{{{('source', 'target')[side]}_lang}} or {{pair}} into its name"
                )
    translated: dict[str, str] = {}
    for pair, one in one_by_one.items():
        systems = [("--hypotheses", one.hypotheses), *(("--compare", system) for system in one.compare)]
        for option, file in systems:
            if file and not is_checkpoint(file) and (other := translated.setdefault(file, pair)) != pair:
                raise UserError(
                    f"{option}: {file} would be the translations of several language pairs ({other}, {pair}); put "
                    "{pair} into its name"
                )


def summary(request: Request, reports: dict[str, dict], evaluation: EvaluationArguments) -> dict[str, dict]:
    """Return and print each system's mean scores over all language pairs and over groups of pairs, and win ratios."""
    pairs_by_group = groups(request.pairs, evaluation.average_languages)
    systems = [request.system, *request.compare]
    scores = {
        system: {pair: list(report["systems"].values())[place] for pair, report in reports.items()}
        for place, system in enumerate(systems)
    }
    by_group: dict[str, dict] = {name: {} for name in pairs_by_group}
    for system, system_scores in scores.items():
        system_means = group_means(system_scores, evaluation.metrics, evaluation.average_languages)
        for name, means in system_means.items():
            by_group[name][system] = means
            print(f"{system}, {name} over {number_of(len(pairs_by_group[name]), 'language pair')}")
            for metric, mean in means.items():
                print(f"  {metric:<10} {mean:6.2f}")
    metric = evaluation.metrics[0]
    ours, *compared = (
        {pair: pair_scores[metric] for pair, pair_scores in system_scores.items()} for system_scores in scores.values()
    )
    others = dict(zip(request.compare, compared, strict=True)) | others_scores(request)
    ratios = {other: win_ratio(ours, theirs, pairs_by_group) for other, theirs in others.items()}
    for other, ratio in ratios.items():
        print(f"{systems[0]} against {other}, win ratio by {metric}")
        for name, percent in ratio.items():
            print(f"  {percent:6.2f} % of {number_of(len(pairs_by_group[name]), 'language pair')}, {name}")
    return {"average": by_group.pop(ALL), "groups": by_group, "win_ratio": ratios}


def others_scores(request: Request) -> dict[str, dict[str, float]]:
    """Return the score of each system for each pair in the `--win_ratio` table; {} without a table."""
    return read_scores(Path(request.win_ratio)) if request.win_ratio else {}


class Texts(NamedTuple):
    """The texts of a language pair: references, sources for checkpoints, and the translations of systems."""

    references: list[str]
    sources: list[str]
    translations: dict[str, list[str]]


def read_texts(request: Request) -> Texts:
    """Read all files of a language pair, and check that they are parallel."""
    references, sources = lines_of(request.reference), []
    translations: dict[str, list[str]] = {}
    for file in [*([request.hypotheses] if request.hypotheses else []), *request.compare]:
        if not is_checkpoint(file):
            translations[file] = lines_of(file)
            check_parallel(translations[file], references, (file, request.reference))
    if request.source:
        sources = lines_of(request.source)
        check_parallel(sources, references, (request.source, request.reference))
    return Texts(references, sources, translations)


class Checkpoints:
    """A loader that loads each checkpoint once, and keeps it until its last use.

    Raises:
        UserError: a checkpoint does not exist, or its config cannot be read.
    """

    def __init__(self, requests: Sequence[Request], texts: Sequence[Texts]) -> None:
        self._uses = Counter(
            name
            for one, given in zip(requests, texts, strict=True)
            for name in (one.system, *one.compare)
            if name not in given.translations
        )
        for name in self._uses:
            if not is_engine(name):
                check_checkpoint(name, trust_remote_code=requests[0].trust_remote_code)
        self._device = requests[0].device
        self._kept: dict[str, tuple[PreTrainedModel | Engine, PreTrainedTokenizerBase]] = {}

    def take(self, name: str, trust_remote_code: bool) -> tuple[PreTrainedModel | Engine, PreTrainedTokenizerBase]:
        """Return a model and its tokenizer, loaded if needed. Models that are kept for later move to the CPU first."""
        loaded = self._kept.pop(name, None)
        for model, _ in self._kept.values():
            if not isinstance(model, Engine):
                model.to("cpu")
        loaded = loaded or load_any_translator(name, self._device, trust_remote_code)
        self._uses[name] -= 1
        if self._uses[name]:
            self._kept[name] = loaded
        return loaded


def evaluate_pair(
    request: Request, evaluation: EvaluationArguments, texts: Texts, checkpoints: Checkpoints
) -> dict[str, Any]:
    """Translate, write translations, score and compare. Return the report for `--output`."""
    baseline, (references, sources, translations) = request.system, texts
    scoring = evaluation.scoring(request.target_lang)
    scores: dict[str, dict] = {}
    for system in (baseline, *request.compare):
        made: dict[str, Any] = {}
        if system not in translations:
            loaded = checkpoints.take(system, request.trust_remote_code)
            translations[system], seconds, search = translate_with(*loaded, sources, request, evaluation)
            made = {"seconds": seconds, "sentences_per_second": len(sources) / seconds, "search": search}
            if system == request.model and request.translations:
                write_whole(Path(request.translations), "".join(f"{line}\n" for line in translations[system]))
        scores[system] = score(translations[system], references, **scoring) | made
        print_scores(system, scores[system], evaluation.metrics)
    report = {
        "reference": request.reference,
        "source": request.source,
        "settings": {name: value for name, value in asdict(evaluation).items() if name not in request.own_search},
        "hf_deepwide": version("hf_deepwide"),
        "systems": scores,
    }
    if request.compare:
        comparisons = {
            system: compare_systems(
                translations[baseline],
                translations[system],
                references,
                samples=evaluation.bootstrap_samples,
                trials=request.trials,
                seed=request.seed,
                **scoring,
            )
            for system in request.compare
        }
        report |= {"baseline": baseline, "comparisons": comparisons}
        print_comparisons(baseline, comparisons)
    return report


def check_arguments(request: Request, evaluation: EvaluationArguments) -> None:
    """Refuse arguments that cannot work, before any text is read or translated."""
    if (request.model is None) == (request.hypotheses is None):
        raise UserError("give one of --model (a checkpoint) and --hypotheses (a file of translations)")
    if request.hypotheses and Path(request.hypotheses).is_dir():
        raise UserError(f"--hypotheses: {request.hypotheses} is a folder; a checkpoint is given by --model")
    device_of(request.device)
    check_numbers(request, RANGES, "--")
    if request.translations and not request.model:
        raise UserError("--translations is for what --model translates; --hypotheses is such a file already")
    checkpoints = [name for name in (request.model, *request.compare) if name and is_checkpoint(name)]
    if (request.model or checkpoints) and not request.source:
        raise UserError(f"{request.model or checkpoints[0]} is a checkpoint: give its input with --source FILE")
    systems = [request.system, *request.compare]
    twice = {name for name in systems if systems.count(name) > 1}
    if twice:
        raise UserError(f"--compare: {', '.join(sorted(twice))} is named twice")
    build_metrics(evaluation.metrics, tokenize=evaluation.tokenize, target_lang=request.target_lang)


def check_summary(request: Request, evaluation: EvaluationArguments) -> None:
    """Refuse, before anything is translated, a request whose summary over pairs would fail in the end."""
    twice = {pair for pair in request.pairs if request.pairs.count(pair) > 1}
    if twice:
        raise UserError(f"--pairs: {', '.join(sorted(twice))} is named twice")
    pairs_by_group = groups(request.pairs, evaluation.average_languages)
    for system, scores in others_scores(request).items():
        if system in request.compare:
            raise UserError(f"--win_ratio: {system} is named in --compare, too; rename one of the two")
        win_ratio(dict.fromkeys(request.pairs, 0.0), scores, pairs_by_group)  # checks that the table has all pairs


def check_outputs(request: Request, one_by_one: Sequence[Request]) -> None:
    """Refuse, before anything is translated, an output that cannot be written or would replace a file.

    An input of any language pair is never overwritten, even under another spelling of its path.
    """
    names = [(one.reference, one.source, one.hypotheses, one.model, *one.compare) for one in one_by_one]
    inputs = {Path(name) for pair_names in (*names, [request.win_ratio]) for name in pair_names if name}
    inputs |= {file for folder in inputs for pattern in LOADED for file in folder.glob(pattern) if folder.is_dir()}
    outputs = [("--translations", Path(one.translations)) for one in one_by_one if one.translations]
    outputs += [("--output", Path(request.output))] if request.output else []
    for number, (option, path) in enumerate(outputs):
        for _, other in outputs[:number]:
            if is_same(path, other):
                raise UserError(f"{other} and {path}, which are to be written, are the same file; give two names")
        with prefixed(f"{option}: "):
            check_output_file(path, inputs=inputs, overwrite=request.overwrite, option="--overwrite")


def is_checkpoint(system: str) -> bool:
    """Return True for a folder, and for a name of the form OWNER/NAME that can be on the Hub; else it is a file."""
    return Path(system).is_dir() or ("/" in system and is_on_hub(system))


def lines_of(name: str) -> list[str]:
    """Return the lines of a text file, plain or `.gz`."""
    return list(read_lines(Path(name)))


def translate_with(
    model: PreTrainedModel | Engine,
    tokenizer: PreTrainedTokenizerBase,
    sources: Sequence[str],
    request: Request,
    evaluation: EvaluationArguments,
) -> tuple[list[str], float, dict[str, Any]]:
    """Translate with a checkpoint. Return the translations, the seconds that it took, and the search settings."""
    own = own_search(model)
    evaluation = replace(evaluation, **{name: getattr(own, name) for name in request.own_search})
    if isinstance(model, Engine):
        known = model.languages
    else:
        model.to(device_of(request.device))
        known = Languages(model.config, model.generation_config, tokenizer)
    # for a model of one pair, `--target_lang` alone only chooses sacreBLEU's tokenizer
    languages = (request.source_lang, request.target_lang) if known.several or request.source_lang else (None, None)
    start = time.perf_counter()
    translations = translate(model, tokenizer, sources, evaluation, *languages)
    seconds = time.perf_counter() - start
    return translations, seconds, {name: getattr(evaluation, name) for name in SEARCH}


def print_scores(system: str, scores: dict, metrics: Sequence[str]) -> None:
    """Print a line for each metric with its signature, and lines on the search and the speed."""
    print(f"{system} ({number_of(scores['sentences'], 'sentence')})")
    for name in metrics:
        print(f"  {name:<10} {scores[name]:6.2f}   {scores['signature'][name]}")
    if "search" in scores:
        options = ", ".join(f"{name} {value}" for name, value in scores["search"].items())
        print(f"  {'search':<10} {options}")
    if "seconds" in scores:
        print(f"  {'translated':<10} {scores['sentences_per_second']:6.2f} sentences a second")


def print_comparisons(baseline: str, comparisons: dict[str, dict]) -> None:
    """Print a line for each system and metric: the difference from the baseline, and the p of both tests."""
    for system, by_metric in comparisons.items():
        print(f"{system} against {baseline}")
        for name, result in by_metric.items():
            bootstrap, randomization = map(p_value, (result["p_bootstrap"], result["p_randomization"]))
            print(
                f"  {name:<10} {signed(result['difference'], 2):>6}   p = {bootstrap} (bootstrap), "
                f"{randomization} (randomisation)"
            )
    if len(comparisons) > 1:
        print(f"p is not corrected for the comparison of {len(comparisons)} systems")
