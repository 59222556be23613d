"""The tables of the four papers as data: benchmarks/paper_tables/*.yaml, one file for each paper.

These files hold the numbers that the papers print, and the recipe from which a row's model is made. No number in them
is a result of ours. Results that a paper only plots, or gives in its text, also have a table here, with a dash in
place of a score. A table has these keys. A key marked * may also be given for a row, and then replaces the table's:

    title, text     what it is of, and what a reader must know
    recipe*         name of a packaged recipe: rows can be trained by it with `set`
    config*         family and fields of a config, where there is no recipe; null: a model that this library lacks;
                    of a recipe of classification, the sizes of the checkpoint that it starts from
    vocabulary*     rows of the embedding, if not those of the recipe's tokenizer
    set*            overrides; a row's come on top of the table's. `{d}` stands for the row's value on the axis d
    axes            name to the key or keys that it sets: a row has its values under `at`
    columns         name to overrides: a row is trained once for each
    rows            of each its name (`row`), `at`, and `scores` as printed, one for each column, between blanks

A row also has keys about its number of parameters. `printed` is the paper's number in millions. `note` explains why
our number differs. With a note there is `should_be`, `paper_has`, or both. `should_be` is the number in millions that
the paper's specification gives. `paper_has` is how many parameters the paper counts more than we do.
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
    """One row of a table, completed with the values that the table gives for all its rows."""

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
        """The row's name in messages."""
        return f"{self.paper}, {place_of(self.table)}: {self.name}"

    def values(self, column: str | None = None) -> dict[str, dict[str, Any]]:
        """The values of the row's recipe with the row's overrides and, if `column` is given, the column's."""
        values = copy.deepcopy(load(self.recipe).values)
        for key, value in (self.overrides | self.columns.get(column, {})).items():
            section, _, name = key.partition(".")
            values[section][name] = value
        return values

    def checked(self, column: str | None = None) -> Recipe:
        """The recipe with these `values`, checked as before a training."""
        base = load(self.recipe)
        return check_recipe(self.values(column), base.name, base.source, type(base))

    @cached_property
    def model_config(self) -> PreTrainedConfig | None:
        """The config of the row's model; None if this library has no such model."""
        return self.config_in(None)

    def config_in(self, column: str | None) -> PreTrainedConfig | None:
        """The config of the row's model, with the overrides of a column if `column` is given."""
        if self.recipe is not None and kind(self.recipe) is ClassificationRecipe:
            recipe = self.checked(column)  # `config` has the sizes of the checkpoint that the recipe starts from
            fields = {**(self.config or {}), **recipe.model_fields, "num_labels": 2}
            return AutoConfig.for_model(recipe.family, **fields, vocab_size=self.vocabulary)
        if self.recipe is not None:
            recipe = self.checked(column)
            fields = recipe.model_fields | (
                posterior_fields(recipe) if hasattr(recipe.data, "posterior_names") else {}
            )
            family, vocabulary = recipe.family, self.vocabulary or recipe.tokenizer.vocab_size
            if recipe.tokenizer.words:  # runs.build reads these fields from the tokenizer
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
        """The number of parameters of the row's model; None if this library has no such model."""
        return None if self.model_config is None else parameters_of(self.model_config, self.task)

    def parameters_by_column(self) -> dict[str, int]:
        """The number of parameters of each column's model; empty if all columns have models of one size."""
        configs = {column: self.config_in(column) for column in self.columns} if self.recipe else {}
        counts = {column: parameters_of(config, self.task) for column, config in configs.items() if config is not None}
        return counts if len(set(counts.values())) > 1 else {}

    @property
    def task(self) -> str:
        """The row's task, a key of `CLASSES`."""
        return "translation" if self.recipe is None else TASKS[kind(self.recipe)]

    def agrees(self, parameters: int) -> bool:
        """Return True if a count plus `paper_has` agrees with `should_be`, or else `printed`, to the last digit."""
        expected = self.should_be or self.printed
        decimals = len(expected.partition(".")[2])
        return f"{(parameters + self.paper_has) / 1e6:.{decimals}f}" == expected

    def changes(self) -> dict[str, Any]:
        """The row's overrides that differ from the values in its recipe."""
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
    """Yield the tables of one paper, given by the name of its file without `.yaml`, or of all papers."""
    for file in sorted((ROOT / "benchmarks" / "paper_tables").glob(f"{paper}.yaml")):
        content = parse_yaml(file.read_text(encoding="utf-8"), str(file))
        for number, values in content["tables"].items():
            yield read_table(content["paper"], str(number), values)


def read_table(paper: str, number: str, values: dict[str, Any]) -> Table:
    """Read one table of a data file."""
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
    """The place of rows in a paper. A number alone is a table's; a figure or a section has its full name."""
    return number if number[0].isalpha() else f"Table {number}"


def kind(recipe: str) -> type[Recipe]:
    """The class of a packaged recipe, by its folder."""
    kinds = {"masked_lm": MaskedLMRecipe, "classification": ClassificationRecipe}
    return kinds.get(recipe.partition("/")[0], Recipe)


@cache
def load(recipe: str) -> Recipe:
    """Load a packaged recipe without overrides."""
    return load_recipe(recipe, kind=kind(recipe))


def parameters_of(config: PreTrainedConfig, task: str = "translation") -> int:
    """Count the parameters of a config's model without giving them values; tied parameters count once."""
    return _count(config.to_json_string(use_diff=False), task)


@cache
def _count(config: str, task: str) -> int:
    fields = json.loads(config)
    made = AutoConfig.for_model(fields.pop("model_type"), **fields)
    with torch.device("meta"), no_init_weights():
        model = CLASSES[task][type(made)](made)
    model.tie_weights()  # a part of the initialisation, which is left out above because it is slow
    return sum(parameter.numel() for parameter in model.parameters())


def arguments(overrides: dict[str, Any]) -> list[str]:
    """Overrides as the arguments of a command."""
    texts = {key: value if isinstance(value, str) else json.dumps(value) for key, value in overrides.items()}
    return [argument for key, text in texts.items() for argument in (f"--{key}", text)]
