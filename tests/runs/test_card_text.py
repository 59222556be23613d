"""Model cards show foreign text as text, and name the repository, the licence, the base and the data of a model."""

import ast
import copy
import re

import pytest
import tiny_run
import yaml
from huggingface_hub import ModelCard
from markdown_it import MarkdownIt
from tiny_run import tiny_values

from hf_deepwide import card_text
from hf_deepwide.errors import UserError
from hf_deepwide.runs.model_card import card_of_results, write_model_card
from hf_deepwide.runs.recipe import check_recipe, load_recipe

HOSTILE = [
    "<script>alert(1)</script>",
    "<img src=x onerror=y>",
    "[click](https://evil.example)",
    "![seen](https://evil.example/p.png)",
    "https://evil.example and www.evil.example or me@evil.example",
    "<https://evil.example>",
    "a | b || c \\| d",
    "two\nlines\r\nthree\u2028four\x0bfive",
    "`code` ``more`` ```fence",
    "```\n# Title\n```",
    "*bold* _it_ ~~gone~~ $x$ &amp; &lt;b&gt;",
    "# Title #",
    "\u202eright to left\x00\x1b[31m \ud800",
    "\\",
    "`",
    "",
]
MARKDOWN = MarkdownIt("gfm-like", {"html": True, "linkify": False}).enable("table")


def text_of(tokens):
    """The text that a reader sees of parsed Markdown."""
    return "".join(
        token.content if token.type in ("text", "code_inline", "text_special") else text_of(token.children or [])
        for token in tokens
    )


def kinds(tokens):
    return {token.type for token in tokens} | {kind for token in tokens for kind in kinds(token.children or [])}


def shown(text):
    return " ".join(text.split())


@pytest.mark.parametrize("text", HOSTILE)
@pytest.mark.parametrize("write", [card_text.text, lambda text: card_text.code(text, cell=True)])
def test_foreign_text_stays_in_its_cell(text, write):
    tokens = MARKDOWN.parse(f"| a | b |\n|---|---|\n| {write(text)} | end |\n")
    assert [token.type for token in tokens].count("td_open") == 2
    assert (
        kinds(tokens) & {"link_open", "image", "html_inline", "html_block", "strong_open", "em_open", "s_open"}
        == set()
    )
    seen = next(token for token in tokens if token.type == "inline" and token.content not in ("a", "b"))
    visible = shown(text_of([seen]).replace("\N{REPLACEMENT CHARACTER}", ""))
    assert visible == shown(re.sub("[\x00-\x08\x0e-\x1b\u202e\ud800]", "", text))
    bare = "".join(child.content for child in seen.children if child.type != "code_inline")
    assert not re.search(r"://|www\.|\w@\w", bare), "a link where it is not code"


def test_ordinary_text_is_left_alone():
    for text in ("Ein Mann, der läuft.", "(1) 50% – so!", "wmt14_en_de", "en-de", "C++", "हिन्दी"):
        assert card_text.text(text) == text
    assert len(card_text.text("x" * 10**6)) <= card_text.LONGEST


@pytest.mark.parametrize("content", ["a: |\n  ```\n  b\n", "````\n```", "x"])
def test_no_line_ends_a_block_of_code(content):
    tokens = MARKDOWN.parse(f"{card_text.block(content, 'yaml')}\n\nafter\n")
    assert [token.content.strip() for token in tokens if token.type == "fence"] == [content.strip()]
    assert tokens[0].type == "fence"


@pytest.mark.parametrize("text", HOSTILE)
def test_a_literal_is_the_string(text):
    line = card_text.literal(text)
    assert ast.literal_eval(line) == text
    assert line.isprintable()


RESULTS = {**tiny_run.RESULTS, "machine": {"processor": HOSTILE[0], "cores": 1, "gpus": [HOSTILE[2]]}}


def hostile_card(folder, text, **data):
    values = tiny_values(folder / "run")
    values["data"] |= data
    values["training"]["run_name"] = text
    recipe = check_recipe(values, text, "tiny.yaml")
    folder.mkdir(exist_ok=True)
    return write_model_card(folder, recipe, copy.deepcopy(RESULTS), [(text, text, text)]).read_text(encoding="utf-8")


@pytest.mark.parametrize("text", [text for text in HOSTILE if text and "\ud800" not in text])
def test_a_card_with_foreign_text_has_the_form_of_any_other(text, tmp_path):
    plain, card = hostile_card(tmp_path, "word"), hostile_card(tmp_path, text)
    forms = []
    for each in (plain, card):
        body = ModelCard(each).text
        tokens = [token for token in MARKDOWN.parse(body) if token.type != "inline"]
        forms.append([token.type for token in tokens])
        assert ModelCard(each).data.pipeline_tag == "translation"
    assert forms[0] == forms[1]
    recipe = next(token for token in MARKDOWN.parse(body) if token.type == "fence" and token.info == "yaml")
    assert yaml.safe_load(recipe.content)["training"]["run_name"] == text


def test_metadata_is_what_the_hub_reads(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "local").mkdir()
    values = tiny_values(tmp_path / "out" / "run")
    values["data"] |= {"format": "datasets", "source_lang": "eng_Latn", "target_lang": "zh-CN", "name": "wmt/wmt14",
                       "train": "train", "validation": "validation", "test": "/home/somebody/test"}  # fmt: skip
    del values["data"]["train_size"]
    values["tokenizer"] = {"path": "/home/somebody/tokenizer"}
    for base, name, expected in (
        ("Helsinki-NLP/opus-mt-en-de", "wmt/wmt14", ("Helsinki-NLP/opus-mt-en-de", ["wmt/wmt14"])),
        ("local/base", "local", (None, None)),
        ("/home/somebody/base", "./corpus", (None, None)),
    ):
        values["model"]["init_from"], values["data"]["name"] = base, name
        recipe = check_recipe(values, "tiny", "tiny.yaml")
        text = write_model_card(tmp_path, recipe, copy.deepcopy(RESULTS), []).read_text(encoding="utf-8")
        data = ModelCard(text).data
        assert (data.base_model, data.datasets) == expected
        assert data.language == ["eng", "zh"]
        assert data.license is None
        assert "/home/somebody" not in text
    assert ModelCard(card_of_results({**RESULTS, "recipe": recipe.values}, "tiny")).data.base_model is None


def test_a_card_names_the_metrics_that_were_computed(tmp_path):
    values, results = tiny_values(tmp_path / "run"), copy.deepcopy(RESULTS)
    values["evaluation"]["metrics"] = ["multi_bleu", "chrf"]
    results["test"] = {"multi_bleu": 3.0, "chrf": 2.0, "sentences": 3, "signature": {"multi_bleu": "a", "chrf": "c"}}
    text = write_model_card(tmp_path, check_recipe(values, "tiny", "tiny.yaml"), results, []).read_text("utf-8")
    data = ModelCard(text).data
    assert data.metrics == ["bleu", "chrf"], "as the Hub calls them"
    assert [(result.metric_name, result.metric_value) for result in data.eval_results] == [
        ("tokenised BLEU", 3.0),
        ("chrF", 2.0),
    ]
    assert "| tokenised BLEU | 3.00 |" in text
    del results["test"]
    text = write_model_card(tmp_path, check_recipe(values, "tiny", "tiny.yaml"), results, []).read_text("utf-8")
    assert ModelCard(text).data.metrics is None


def test_the_scores_of_several_pairs_name_their_places(tmp_path):
    values, results = tiny_values(tmp_path / "run"), copy.deepcopy(RESULTS)
    places = {"train": "{pair}/train", "validation": "{pair}/dev", "test": "{sorted_pair}/test"}
    values["data"] = {"format": "datasets", "name": "talks_{pair}", "pairs": ["en-de", "fr-en"], **places}
    scores = {"bleu": 3.0, "sentences": 3, "signature": {"bleu": "a"}}
    results["test"] = {
        "pairs": {"en-de": scores, "fr-en": scores},
        "average": {"bleu": 3.0},
        "signature": {"bleu": "a"},
    }
    text = write_model_card(tmp_path, check_recipe(values, "tiny", "tiny.yaml"), results, []).read_text("utf-8")
    assert [(result.dataset_type, result.dataset_name) for result in ModelCard(text).data.eval_results] == [
        ("talks_en-de", "de-en/test en-de"),
        ("talks_fr-en", "en-fr/test fr-en"),
    ]


def test_code_has_metrics_of_its_own_and_no_language(tmp_path):
    recipe, results = load_recipe("code_conala_mat"), copy.deepcopy(RESULTS)
    results["test"] = {"sentence_bleu4": 2.75, "valid_python": 40.0, "sentences": 3,
                       "signature": {"sentence_bleu4": "a", "valid_python": "b"}}  # fmt: skip
    text = write_model_card(tmp_path, recipe, results, []).read_text(encoding="utf-8")
    data = ModelCard(text).data
    assert data.metrics == ["sentence_bleu4", "valid_python"]
    assert data.language is None, "nl is no Dutch here, and py is no language"
    assert {"code", "python"} <= set(data.tags)
    assert "| sentence BLEU-4 | 2.75 |" in text
    assert "| valid Python, % | 40.00 |" in text


def test_a_folder_below_the_root_is_no_data_set_of_the_hub(tmp_path):
    """Such a folder is the output of `hf-deepwide data wmt14-en-de --output corpora`."""
    (tmp_path / "corpora" / "wmt14-en-de").mkdir(parents=True)
    values = tiny_values(tmp_path / "run")
    values["data"] = {"format": "datasets", "name": "wmt14-en-de", "root": str(tmp_path / "corpora"),
                      "train": "train", "validation": "validation", "test": "test"}  # fmt: skip
    card = write_model_card(tmp_path, check_recipe(values, "tiny", "tiny.yaml"), copy.deepcopy(RESULTS), [])
    assert ModelCard(card.read_text(encoding="utf-8")).data.datasets is None


def test_a_shared_card_names_its_repository(tmp_path):
    card = hostile_card(tmp_path / "author", "word")
    assert "author" in card
    shared = card_text.for_repository(card, "me/mine", None)
    assert 'pipeline("translation", model="me/mine", trust_remote_code=True)' in shared
    assert "import hf_deepwide  #" not in shared
    assert re.search(r"# needs: pip install 'torch>=[\d.]+' 'transformers>=[\d.]+'\n", shared)
    unnamed = card_text.for_repository(card, None, None)
    for each in (shared, unnamed):
        assert "author" not in each.partition("## Scores")[0]
        for block in re.findall(r"```python\n(.*?)```", each, re.DOTALL):
            ast.parse(block)
    assert 'model="REPOSITORY"' in unnamed
    assert card_text.for_repository(unnamed, "me/mine", None) == shared
    assert card_text.for_repository(shared, None, None) == shared
    assert 'model="you/yours"' in card_text.for_repository(shared, "you/yours", None)


def test_a_licence_is_named_only_where_it_was_given(tmp_path):
    card = hostile_card(tmp_path, "word")
    assert ModelCard(card).data.license is None
    licensed = card_text.for_repository(card, "me/mine", "apache-2.0")
    before, after = ModelCard(card).data.to_dict(), ModelCard(licensed).data.to_dict()
    assert after == before | {"license": "apache-2.0"}
    assert "No licence" in card
    assert "No licence" not in licensed
    old = "Its licence is for whoever trained it to\nchoose, with a view to the licence of that data.\n"
    of_base = card.replace("licence of the training data.", "licence of the training data and of the base.")
    for unchosen in (card, old, of_base):
        assert "Its licence is `apache-2.0`." in card_text.for_repository(unchosen, None, "apache-2.0")
    again = card_text.for_repository(licensed, "me/mine", "mit")
    assert "Its licence is `mit`." in again
    assert "apache-2.0" not in again
    assert card_text.for_repository("# Mine\n", None, "mit").endswith("# Mine\n")
    for wrong in ("", "MIT License", "mit\nevil: 1", "a: b"):
        with pytest.raises(UserError, match="licence"):
            card_text.check_license(wrong)
    with pytest.raises(UserError, match="metadata"):
        card_text.for_repository("---\n- a\n---\n", None, "mit")
    with pytest.raises(UserError, match="metadata"):
        card_text.for_repository("---\na: [\n---\n", None, "mit")
