"""The papers' tables: every row's recipe loads, every count is the paper's, and the pages are up to date."""

import copy
import itertools
import shlex

import paper_tables
import pytest
from paper_rows import arguments, load, parameters_of, read_table
from parameter_counts import tables

from hf_deepwide import VanillaTransformerConfig
from hf_deepwide.runs.recipe import PACKAGED, packaged_recipes, parse_overrides

TABLES = tables()
ROWS = [row for table in TABLES for row in table.rows]
TRAINED = [row for row in ROWS if row.recipe]
# some rows quote systems that this library does not have: their sizes cannot be checked
PRINTED = [row for row in ROWS if row.printed and (row.recipe or row.config)]
# for each paper: the numbers of its tables, and how many rows each table has
COMPLETE = {
    "Fan": {
        **{"1": 10, "section 4.2": 1, "2": 5, "3 left": 7, "3 right": 7, "4": 9, "5": 4, "6": 6, "7": 6, "8": 6},
        **{"9": 3, "10": 1},
        **{"11": 8, "12": 5, "13": 3, "14": 10, "15": 5, "16": 9, "17": 9, "18": 9, "19": 9},
        **{"20": 5, "21": 5, "22": 5, "23": 5, "24": 5, "25": 5, "26": 5, "27": 5},
    },
    "Lin": {
        **{"1": 0, "2": 26, "3: De-En": 7, "3: En-Fr": 7, "3: Fr-En": 7, "4": 6},
        **{"Figure 1": 8, "Figure 5": 6, "Figure 6": 4},
    },
    "Li": {
        **{"1": 8, "2": 7, "3": 8, "4": 9, "5": 10, "6": 3, "7": 4, "8": 2, "9": 2},
        **{"section 1": 3, "Algorithm 1": 3, "Figure 5": 5},
    },
    "Xu": {"1": 8, "2": 3, "3": 3, "4": 3, "5": 3, "6": 26, "7: En→xx": 3, "7: xx→En": 3},
}


def test_no_row_of_a_table_is_left_out():
    found = {}
    for table in TABLES:
        found.setdefault(table.paper.partition(" ")[0], {})[table.number] = len(table.rows)
    assert found == COMPLETE


@pytest.mark.parametrize("table", TABLES, ids=lambda table: f"{table.paper.partition(' ')[0]} {table.number}")
def test_recipes_load_with_the_overrides_of_rows_and_columns(table):
    for row in table.rows:
        for column in row.columns if row.recipe else ():
            recipe = row.checked(column)
            more = row.changes() | row.columns[column]
            assert parse_overrides(arguments(more)) == list(more.items()), "a shell gives what the row has"
            changed = {key: recipe.values[key.partition(".")[0]][key.partition(".")[2]] for key in more}
            assert changed == more


@pytest.mark.parametrize("table", sorted({(row.paper, row.table) for row in PRINTED}), ids=str)
def test_counts_are_the_printed_ones(table):
    for row in PRINTED:
        if (row.paper, row.table) == table:
            assert row.agrees(row.parameters), f"{row.label}: {row.parameters}, printed {row.printed} M"


def test_the_classifiers_have_the_sizes_of_their_base():
    """Compare with RoBERTa-large in closed form. A second branch repeats the four projections of each attention.

    The formula leaves out two rows of RoBERTa's position table, which no text uses. It also leaves out the only
    token-type embedding, which RoBERTa adds to every token.
    """
    d, layers, positions, vocabulary = 1024, 24, 512, 50265
    attention, ffn, norm = 4 * (d * d + d), 2 * 4 * d * d + 5 * d, 2 * d
    head = d * d + d + 2 * d + 2
    plain = (vocabulary + positions) * d + norm + layers * (attention + ffn + 2 * norm) + head
    found = {row.name: row.parameters for row in ROWS if row.task == "classification"}
    assert found["RoBERTa"] == found["+ LayerDrop"] == plain
    assert found["MAT, 2 branches"] == plain + layers * attention


def test_explains_only_rows_that_differ():
    """A row has a note if, and only if, our count differs from the printed number."""
    for row in PRINTED:
        plain = copy.copy(row)
        plain.should_be, plain.paper_has = None, 0
        assert plain.agrees(row.parameters) == (row.note is None), row.label


def test_counts_notice_one_layer_more_or_less():
    """In each table that prints sizes, change a stack of the first row, and a stack of the last row."""
    for _, rows in itertools.groupby(PRINTED, key=lambda row: (row.paper, row.table)):
        rows = list(rows)
        for row, stack, step in (
            (rows[0], "encoder", -1),
            (rows[-1], "decoder" if rows[-1].task == "translation" else "encoder", 1),
        ):
            config = copy.deepcopy(row.model_config)
            setattr(config, f"{stack}_layers", getattr(config, f"{stack}_layers") + step)
            assert not row.agrees(parameters_of(config, row.task)), row.label


def test_the_overview_is_up_to_date():
    page = paper_tables.PAGE.read_text(encoding="utf-8")
    assert paper_tables.with_overview(page) == page, "run python benchmarks/paper_tables.py"


def test_prints_the_rows_of_a_paper(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["paper_tables.py", "--rows", "multipath"])
    paper_tables.main()
    printed = capsys.readouterr().out
    assert "wmt14_en_de_multipath_6x6" in printed
    assert "M parameters, printed" in printed
    assert "\nTable 2: WMT14" in printed
    assert "\nFigure 5: WMT14" in printed
    (of_one_layer,) = [line for line in printed.splitlines() if line.startswith("    M parameters: 1 path 45.")]
    plain = parameters_of(VanillaTransformerConfig(vocab_size=34040, encoder_layers=1, normalize_before=True))
    assert f"1 path {plain / 1e6:.3f}, 2 paths" in of_one_layer


@pytest.mark.parametrize("row", TRAINED[:: len(TRAINED) // 12], ids=lambda row: row.label)
def test_a_row_has_the_command_that_trains_it(row):
    program, task, *words = shlex.split(paper_tables.command(row))
    kind = row.task if row.task != "translation" else None
    recipe, *overrides = words if kind is None else words[1:]
    assert (program, task, None if kind is None else words[0]) == ("hf-deepwide", "train", kind)
    assert (recipe, parse_overrides(overrides)) == (row.recipe, list(row.changes().items()))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"rows": [{"row": "a", "scores": "1.0 2.0"}]}, "2 scores for 1 columns"),
        ({"rows": [{"row": "a", "scores": 1.0}]}, "in quotes"),
        ({"rows": [{"row": "a", "skores": "1.0"}]}, "skores"),
        ({"colums": {}}, "colums"),
        ({"columns": {"BLEU": {"bleu": 1}}}, "a column has {'bleu'}"),
    ],
)
def test_what_is_wrong_in_a_data_file_is_named(change, words):
    with pytest.raises(ValueError, match=words):
        read_table("Paper", "1", {"title": "x", "columns": {"BLEU": {}}, "rows": []} | change)


def test_recipes_of_the_papers_are_rows():
    """Each recipe is a row's own recipe, or equals a row with the overrides of one column."""
    names, rows = set(packaged_recipes()), {row.recipe for row in TRAINED}
    of_papers = {name for name in names if "Table " in (PACKAGED / f"{name}.yaml").read_text(encoding="utf-8")}
    # no paper has Multi30k, no table has this direction of TED8-Related, and the tasks of GLUE are columns
    of_papers -= {name for name in names if "multi30k" in name} | {"ted8_related_m2o_latent_depth"}
    of_papers -= {f"classification/{task}" for task in ("mnli", "qnli", "sst2")}
    values = [row.values(column) for row in TRAINED for column in row.columns if row.columns[column]]
    others = {name: copy.deepcopy(load(name).values) for name in of_papers - rows}
    for each in (*values, *others.values()):
        each.get("evaluation", {}).pop("metrics", None)  # a column may have its own metric
    assert [name for name, own in others.items() if own not in values] == []


def test_loading_does_not_change_what_is_handed_out():
    row = next(row for row in TRAINED if row.changes())
    before = copy.deepcopy(load(row.recipe).values)
    row.values()
    assert load(row.recipe).values == before
