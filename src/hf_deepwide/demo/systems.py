"""The systems that translate for the page: checkpoints, and folders that were exported to CTranslate2."""

import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedTokenizerBase

from ..analysis.figures import run_labels
from ..analysis.inside import Inside, look_inside
from ..errors import UserError, one_line
from ..evaluation.arguments import own_search
from ..evaluation.checkpoint import device_of, load_translator
from ..evaluation.engine import Engine, is_engine
from ..evaluation.translate import as_line, generate_beams
from ..models.language_pairs import Choice, Languages
from ..models.plain_text import Source, encode_sources, length_limit, source_limit
from ..models.word_tokenizer import SPACE, WordTokenizer

WARM_UP = "1"


class Request(NamedTuple):
    """A reader's request on the page. A language is None if the reader has not chosen one."""

    lines: tuple[str, ...]
    beams: int
    source_lang: str | None = None
    target_lang: str | None = None


class Beam(NamedTuple):
    """One translation of a line: its text, its tokens, and its score.

    `score` is log-probability / length**length_penalty, with the model's own length penalty. It is None if the search
    keeps no scores (one beam).
    """

    text: str
    ids: tuple[int, ...]
    score: float | None


class Answer(NamedTuple):
    """The result of a request to one system.

    Attributes:
        beams: the translations of each line, best first. An empty line has none.
        seconds: the time that the system took for all lines.
        notes: notes for the reader, such as that a line was cut.
    """

    beams: tuple[tuple[Beam, ...], ...]
    seconds: float
    notes: tuple[str, ...]


class Seen(NamedTuple):
    """The inside of a system on one line: attention and gates, the source and target tokens, and the posterior."""

    inside: Inside
    source: list[str]
    target: list[str]
    posterior: int


class System(ABC):
    """A system that translates by beam search: a model that Transformers runs, or a model that CTranslate2 runs."""

    name: str
    facts: str  # facts about the system, on one line
    model: Any  # None for a system that CTranslate2 runs
    translator: Any  # the model, or the engine
    tokenizer: PreTrainedTokenizerBase
    languages: Languages
    choose: Callable[..., Choice]  # has the arguments of `Languages.choose`
    limit: int  # most tokens of a source

    def translate(self, request: Request) -> Answer:
        """Translate by beam search, with the requested number of beams and else the search settings of the model."""
        settings = own_search(self.translator, num_beams=request.beams)
        languages = _languages(self, request)
        start = time.perf_counter()
        found = generate_beams(
            self.translator,
            self.tokenizer,
            request.lines,
            settings,
            source_lang=languages[0],
            target_lang=languages[1],
        )
        seconds = time.perf_counter() - start
        beams = tuple(
            tuple(Beam(as_line(self.tokenizer, beam.ids), tuple(beam.ids), beam.score) for beam in line)
            for line in found
        )
        _, sources = self._encode(request)
        return Answer(beams, seconds, _notes(self, request, sources))

    @abstractmethod
    def look(self, request: Request, line: int, beam: Beam) -> Seen | None:
        """Return what the system does with a line and its translation; None if the system does not show it."""

    def _encode(self, request: Request) -> tuple[Choice, list[Source]]:
        choice = self.choose(*_languages(self, request))
        return choice, encode_sources(self.languages, choice, request.lines, self.limit)


def load_systems(models: Sequence[str | os.PathLike]) -> list[System]:
    """Load each model and translate once with it, so that the first reader does not have to wait.

    Args:
        models: folders of runs or checkpoints, folders exported to CTranslate2, or Hub ids.

    Raises:
        UserError: there is no model, or a model cannot be loaded, cannot translate, or is given twice.
    """
    if not models:
        raise UserError("demo: name at least one model")
    paths = [Path(model) for model in models]
    for model in models:
        if models.count(model) > 1:
            raise UserError(f"demo: {model} is given twice")
    names = run_labels(paths) if all(path.is_dir() for path in paths) else [os.fspath(model) for model in models]
    systems: list[System] = []
    for model, path, name in zip(models, paths, names, strict=True):
        systems.append(ExportedSystem(path, name) if is_engine(path) else CheckpointSystem(os.fspath(model), name))
    for system in systems:
        source_lang, target_lang = start_languages(system.languages)
        try:
            system.translate(Request((WARM_UP,), 2, source_lang, target_lang))
        except (ValueError, RuntimeError, LookupError) as error:
            raise UserError(f"{system.name} cannot translate: {one_line(error)}") from error
    return systems


class CheckpointSystem(System):
    """A model that Transformers runs."""

    def __init__(self, checkpoint: str, name: str) -> None:
        self.name = name
        self.model, self.tokenizer = load_translator(checkpoint)
        self.model.to(device_of(None)).eval()
        self.translator, self.limit = self.model, source_limit(self.model.config, self.tokenizer)
        self.languages = Languages(self.model.config, self.model.generation_config, self.tokenizer)
        self.choose = self.languages.choose
        self.facts = _facts(self.model)

    def look(self, request: Request, line: int, beam: Beam) -> Seen | None:
        """Run the model once more over the line and its translation."""
        choice, sources = self._encode(request)
        source_ids = sources[line].ids
        generation = self.model.generation_config
        starts = (choice.settings, vars(generation), vars(self.model.config))
        start = next(
            found["decoder_start_token_id"] for found in starts if found.get("decoder_start_token_id") is not None
        )
        posteriors = {} if choice.posterior is None else {"posteriors": torch.tensor([choice.posterior])}
        inside = look_inside(
            self.model,
            source_ids,
            [start, *beam.ids],
            **{name: ids.to(self.model.device) for name, ids in posteriors.items()},
        )
        source, target = words(self.tokenizer, source_ids, is_source=True), words(self.tokenizer, beam.ids)
        return Seen(inside, source, target, choice.posterior or 0)


class ExportedSystem(System):
    """A folder that CTranslate2 runs, with the tokenizer's files in it.

    Raises:
        UserError: ctranslate2 is not installed, or the folder is damaged.
    """

    model = None

    def __init__(self, folder: Path, name: str) -> None:
        self.name, self.translator = name, Engine(folder)
        self.tokenizer, self.languages = self.translator.tokenizer, self.translator.languages
        self.choose, self.limit = self.translator.choose, self.translator.limit
        megabytes = sum(file.stat().st_size for file in folder.iterdir() if file.is_file()) / 1e6
        self.facts = f"CTranslate2, {self.translator.translator.compute_type}, {megabytes:,.0f} MB"

    def look(self, request: Request, line: int, beam: Beam) -> Seen | None:
        """Search again for this line, with the attention that the engine reports (by default, of one head)."""
        choice, sources = self._encode(request)
        ids, settings = sources[line].ids, own_search(self.translator, num_beams=request.beams)
        (result,) = self.translator.search(
            choice,
            [ids],
            beams=settings.num_beams,
            length_penalty=settings.length_penalty,
            longest=length_limit(None, len(ids), settings),
            return_attention=True,
        )
        tokens = self.tokenizer.convert_ids_to_tokens(list(beam.ids))
        place = next((place for place, found in enumerate(result.hypotheses) if found == tokens), None)
        if place is None or not result.attention[place]:
            return None
        weights = torch.tensor(result.attention[place])[: len(tokens)]  # [T, S]
        source = words(self.tokenizer, sources[line].ids[: weights.shape[1]], is_source=True)
        inside = Inside({0: weights[None]}, {})
        return Seen(inside, source, words(self.tokenizer, beam.ids)[: len(weights)], 0)


def language_choices(languages: Languages) -> tuple[list[str], list[str]]:
    """Return the source and target languages that a user can choose. A side without a choice is an empty list."""
    if languages.codes:
        return sorted(languages.codes), sorted(languages.codes)
    if languages.tags:
        return [], sorted(languages.tags)
    sides = list(zip(*(languages.pairs or languages.tasks), strict=True)) or [(), ()]
    return sorted(set(sides[0])), sorted(set(sides[1]))


def start_languages(languages: Languages) -> tuple[str | None, str | None]:
    """Return the language pair to begin with.

    It is a pair that the model was trained on, if its config names one. A language is None if the model needs none.
    """
    if languages.trained_pairs:
        return languages.trained_pairs[0]
    try:
        languages.choose()
    except ValueError:
        sources, targets = language_choices(languages)
        if pairs := languages.pairs or languages.tasks:
            source, target = next(iter(pairs))
            return source, target
        return next(iter(sources), None), next(iter(targets), None)
    if languages.tags:
        return None, languages.trained[1] if languages.trained else min(languages.tags)
    return None, None


def words(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], is_source: bool = False) -> list[str]:
    """Return each token as readable text. A token that is no whole character stays as the vocabulary spells it.

    A `WordTokenizer` decodes only target ids. For source ids, its tokens are used.
    """
    tokens = tokenizer.convert_ids_to_tokens(list(ids))
    if isinstance(tokenizer, WordTokenizer):
        spelt = tokens if is_source else [tokenizer.decode([token_id]) for token_id in ids]
        return [word.strip() or SPACE for word in spelt]
    spelt = []
    for token_id, token in zip(ids, tokens, strict=True):
        text = tokenizer.decode([token_id], clean_up_tokenization_spaces=False).strip()
        spelt.append(text if text and "�" not in text else str(token))
    return spelt


def _languages(system: System, request: Request) -> tuple[str | None, str | None]:
    """Return the languages of a request; None for a side on which the system has no choice."""
    sources, targets = language_choices(system.languages)
    return request.source_lang if sources else None, request.target_lang if targets else None


def _notes(system: System, request: Request, sources: Sequence[Source]) -> tuple[str, ...]:
    """Return notes for the reader on lines that were cut, and on languages that do not apply."""
    notes = [
        f"Line {number} has {source.length:,} tokens; the model read the first {len(source.ids):,}."
        for number, source in enumerate(sources, start=1)
        if source.length > len(source.ids)
    ]
    if not system.languages.several and (request.source_lang or request.target_lang):
        notes.append("This model translates one language pair; the chosen languages do not apply.")
    return tuple(notes)


def _facts(model: Any) -> str:
    """Return the family, sizes and languages of a model, on one line."""
    config = model.config
    facts = [config.model_type.replace("_", " "), f"{model.num_parameters() / 1e6:.1f} M parameters"]
    layers = [getattr(config, f"{stack}_layers", None) for stack in ("encoder", "decoder")]
    if None not in layers:
        facts.append("{} + {} layers".format(*layers))
    for name, what in (("attention_branches", "attention branches"), ("encoder_paths", "paths")):
        if (count := getattr(config, name, 1)) > 1:
            facts.append(f"{count} {what}")
    pair = getattr(config, "source_lang", None), getattr(config, "target_lang", None)
    if None not in pair:
        facts.append("{} → {}".format(*pair))
    return " · ".join(facts)
