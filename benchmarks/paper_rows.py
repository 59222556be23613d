"""The tables of the four papers as data: benchmarks/paper_tables/*.yaml, one file a paper.

These files hold what the papers print and how a row's model is had from a recipe; nothing there is counted or run by
us. What a paper only plots, or says in its text, stands there like a table, with a dash in place of a score.
Keys of a table; those marked * may also be of a row, and then go before its table's:

    title, text     what it is of, and what a reader must know
    recipe*         name of a packaged recipe: rows can be trained by it with `set`
    config*         family and fields of a config, where there is no recipe; null: a model that this library lacks;
                    of a recipe of classification, the sizes of the checkpoint that it starts from
    vocabulary*     rows of the embedding, if not those of the recipe's tokenizer
    set*            overrides; a row's come on top of the table's. `{d}` stands for the row's value on the axis d
    axes            name to the key or keys that it sets: a row has its values under `at`
    columns         name to overrides: a row is trained once for each
    rows            of each its name (`row`), `at`, and `scores` as printed, one for each column, between blanks

and of a row, for its parameters, in millions: `printed`; `note`, where ours is another number; with it `should_be`,
what the papers' specification counts for the row, or `paper_has`, so many parameters more than ours, or both.
"""

import copy
import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import torch
from transformers import (
    MODEL_FOR_MASKED_LM_MAPPING,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    AutoConfig,
    PreTrainedConfig,
)
from transformers.initialization import no_init_weights

import hf_deepwide
from hf_deepwide.runs.build import posterior_fields
from hf_deepwide.runs.classification import ClassificationRecipe
from hf_deepwide.runs.masked_lm import MaskedLMRecipe
from hf_deepwide.runs.recipe import Recipe, check_recipe, load_recipe, parse_yaml

ROOT = Path(__file__).parent.parent
OF_TABLE = {"title", "text", "recipe", "config", "vocabulary", "set", "axes", "columns", "rows"}
OF_ROW = {"row", "at", "recipe", "config", "vocabulary", "set", "printed", "note", "should_be", "paper_has", "scores"}
assert hf_deepwide  # registers the families
TASKS = {Recipe: "translation", MaskedLMRecipe: "masked-lm", ClassificationRecipe: "classification"}
CLASSES = {
    "translation": MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
    "masked-lm": MODEL_FOR_MASKED_LM_MAPPING,
    "classification": MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
}


@dataclass
class Row:
    """One row of a table, with what its table says of all rows filled in."""

    paper: str
    table: str
    name: str
    recipe: str | None
    config: dict[str, Any] | None
    vocabulary: int | None
    overrides: dict[str, Any]
    columns: dict[str, dict[str, Any]]
    scores: list[str]
    printed: str | None = None
    note: str | None = None
    should_be: str | None = None
    paper_has: int = 0

    @property
    def label(self) -> str:
        """For messages."""
        return f"{self.paper}, {place_of(self.table)}: {self.name}"

    def values(self, column: str | None = None) -> dict[str, dict[str, Any]]:
        """The contents of the row's recipe with its overrides and, if one is named, a column's."""
        values = copy.deepcopy(load(self.recipe).values)
        for key, value in (self.overrides | self.columns.get(column, {})).items():
            section, _, name = key.partition(".")
            values[section][name] = value
        return values

    def checked(self, column: str | None = None) -> Recipe:
        """These, checked as a recipe is before it is trained."""
        base = load(self.recipe)
        return check_recipe(self.values(column), base.name, base.source, type(base))

    @cached_property
    def model_config(self) -> PreTrainedConfig | None:
        """The config of the row's model; None if this library has no such model."""
        return self.config_in(None)

    def config_in(self, column: str | None) -> PreTrainedConfig | None:
        """The config of the row's model with what a column overrides, if one is named."""
        if self.recipe is not None and kind(self.recipe) is ClassificationRecipe:
            recipe = self.checked(column)  # `config` has the sizes of the checkpoint that it starts from
            fields = {**(self.config or {}), **recipe.model_fields, "num_labels": 2}
            return AutoConfig.for_model(recipe.family, **fields, vocab_size=self.vocabulary)
        if self.recipe is not None:
            recipe = self.checked(column)
            fields = recipe.model_fields | (
                posterior_fields(recipe) if hasattr(recipe.data, "posterior_names") else {}
            )
            family, vocabulary = recipe.family, self.vocabulary or recipe.tokenizer.vocab_size
            if recipe.tokenizer.words:  # as runs.build has it of the tokenizer
                target = recipe.tokenizer.target_vocab_size or vocabulary
                fields |= {"decoder_vocab_size": target, "share_encoder_decoder_embeddings": False}
        elif self.config is not None:
            fields = self.config | {key.removeprefix("model."): value for key, value in self.overrides.items()}
            family, vocabulary = fields.pop("family"), self.vocabulary
        else:
            return None
        return AutoConfig.for_model(family, **fields, vocab_size=vocabulary)

    @property
    def parameters(self) -> int | None:
        """How many the row's model has."""
        return None if self.model_config is None else parameters_of(self.model_config, self.task)

    def parameters_by_column(self) -> dict[str, int]:
        """How many the model of each column has, where columns have models of other sizes."""
        configs = {column: self.config_in(column) for column in self.columns} if self.recipe else {}
        counts = {column: parameters_of(config, self.task) for column, config in configs.items() if config is not None}
        return counts if len(set(counts.values())) > 1 else {}

    @property
    def task(self) -> str:
        """A key of `CLASSES`."""
        return "translation" if self.recipe is None else TASKS[kind(self.recipe)]

    def agrees(self, parameters: int) -> bool:
        """Whether a count is the printed one to its last digit or, where a note says why not, what it says instead."""
        expected = self.should_be or self.printed
        decimals = len(expected.partition(".")[2])
        return f"{(parameters + self.paper_has) / 1e6:.{decimals}f}" == expected

    def changes(self) -> dict[str, Any]:
        """The overrides of the row that change its recipe."""
        before = load(self.recipe).values
        sections = {key: key.partition(".") for key in self.overrides}
        return {
            key: value
            for key, value in self.overrides.items()
            if before[sections[key][0]].get(sections[key][2], ...) != value
        }


@dataclass
class Table:
    """A table of a paper."""

    paper: str
    number: str
    title: str
    text: str
    axes: list[str]
    columns: dict[str, dict[str, Any]]
    rows: list[Row]


def read_tables(paper: str = "*") -> Iterator[Table]:
    """The tables of a paper, called as its file, or of all papers."""
    for file in sorted((ROOT / "benchmarks" / "paper_tables").glob(f"{paper}.yaml")):
        content = parse_yaml(file.read_text(encoding="utf-8"), str(file))
        for number, values in content["tables"].items():
            yield read_table(content["paper"], str(number), values)


def read_table(paper: str, number: str, values: dict[str, Any]) -> Table:
    """One table of a data file."""
    where = f"{paper}, {place_of(number)}"
    if unknown := set(values) - OF_TABLE:
        raise ValueError(f"{where}: unknown keys {unknown}; accepted: {OF_TABLE}")
    axes, rows = values.get("axes", {}), []
    columns = {column: more or {} for column, more in values.get("columns", {}).items()}
    if unknown := {key for more in columns.values() for key in more if "." not in key}:
        raise ValueError(f"{where}: a column has {unknown}; accepted: overrides, as SECTION.KEY")
    for given in values["rows"]:
        name = " ".join([given.get("row", ""), "/".join(map(str, given.get("at", [])))]).strip()
        if unknown := set(given) - OF_ROW:
            raise ValueError(f"{where}: {name}: unknown keys {unknown}; accepted: {OF_ROW}")
        overrides = {}
        for axis, value in zip(axes, given.get("at", []), strict="at" in given):
            keys = [axes[axis]] if isinstance(axes[axis], str) else axes[axis]
            overrides |= dict.fromkeys(keys, value)
        overrides |= values.get("set", {}) | given.get("set", {})
        for axis, value in zip(axes, given.get("at", []), strict=False):
            overrides = {
                key: text.replace(f"{{{axis}}}", str(value)) if isinstance(text, str) else text
                for key, text in overrides.items()
            }
        shared = {key: given.get(key, values.get(key)) for key in ("recipe", "config", "vocabulary")}
        if not isinstance(given["scores"], str):
            raise ValueError(f"{where}: {name}: write scores as text, in quotes, or final zeros are lost")
        scores = given["scores"].split()
        if len(scores) != len(columns):
            raise ValueError(f"{where}: {name}: {len(scores)} scores for {len(columns)} columns")
        own = {key: given[key] for key in ("printed", "note", "should_be", "paper_has") if key in given}
        rows.append(
            Row(
                paper=paper,
                table=number,
                name=name,
                overrides=overrides,
                columns=columns,
                scores=scores,
                **shared,
                **own,
            )
        )
    return Table(paper, number, values["title"], values.get("text", ""), list(axes), columns, rows)


def place_of(number: str) -> str:
    """Where rows stand in a paper: in a table, of which only the number is given, or in a figure, or in a section."""
    return number if number[0].isalpha() else f"Table {number}"


def kind(recipe: str) -> type[Recipe]:
    """What kind of recipe a packaged one is."""
    kinds = {"masked_lm": MaskedLMRecipe, "classification": ClassificationRecipe}
    return kinds.get(recipe.partition("/")[0], Recipe)


@cache
def load(recipe: str) -> Recipe:
    """A recipe as it is handed out."""
    return load_recipe(recipe, kind=kind(recipe))


def parameters_of(config: PreTrainedConfig, task: str = "translation") -> int:
    """Parameters of the model of a config: tied ones once, and none of them filled in."""
    return _count(config.to_json_string(use_diff=False), task)


@cache
def _count(config: str, task: str) -> int:
    fields = json.loads(config)
    made = AutoConfig.for_model(fields.pop("model_type"), **fields)
    with torch.device("meta"), no_init_weights():
        model = CLASSES[task][type(made)](made)
    model.tie_weights()  # a part of initialisation, which takes as long as all the rest
    return sum(parameter.numel() for parameter in model.parameters())


def arguments(overrides: dict[str, Any]) -> list[str]:
    """Overrides as the arguments of a command."""
    texts = {key: value if isinstance(value, str) else json.dumps(value) for key, value in overrides.items()}
    return [argument for key, text in texts.items() for argument in (f"--{key}", text)]
