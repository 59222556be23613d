"""Files, links, commands, recipe keys and families that the pages name exist, and generated parts are up to date."""

import builtins
import importlib
import re
from importlib.metadata import requires
from pathlib import Path

import families_picture
import pytest
import recipe_page
import transformers
from packaging.requirements import Requirement
from printed import PAGES, ROOT, anchors, blocks, commands, links

from hf_deepwide.families import FAMILIES
from hf_deepwide.runs.classification import ClassificationRecipe
from hf_deepwide.runs.masked_lm import MaskedLMRecipe
from hf_deepwide.runs.recipe import PACKAGED, Recipe, load_recipe
from hf_deepwide.runs.schema import recipe_schema
from hf_deepwide_cli import COMMANDS
from hf_deepwide_cli.parser import Parser, split_overrides

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
PATH = re.compile(r"(?<![\w/.-])(?:src|scripts|benchmarks|docs|tests|model_cards)/[\w./-]*\w/?(?![\w*{<…])")
PROPERTIES = [recipe_schema(kind)["properties"] for kind in (Recipe, MaskedLMRecipe, ClassificationRecipe)]


@each_page
def test_every_link_leads_somewhere(page):
    for link in links(page):
        if link.startswith(("http://", "https://")):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def named_files(page: Path) -> list[str]:
    """The files of the repository that a page names without a link."""
    return PATH.findall(re.sub(r"\]\([^)]*\)|https?://\S+", "", page.read_text(encoding="utf-8")))


@each_page
def test_every_file_exists(page):
    for path in named_files(page):
        assert (ROOT / path).exists() or "STUDY" in path, path


@each_page
def test_every_command_is_accepted(page):
    for command, *words in commands(page):
        if command in ("COMMAND", "…", "--help"):
            continue
        module = importlib.import_module(f"hf_deepwide_cli.{command}")
        assert command in COMMANDS
        if not words or "--help" in words or "…" in words:
            continue
        parser = Parser(prog=command)
        module.configure(parser)
        if not getattr(module, "TAKES_OVERRIDES", False):
            parser.parse_args(words)
            continue
        args, overrides = split_overrides(parser, words)
        keys = [word.partition("=")[0][2:] for word in overrides if word.startswith("--")]
        config = FAMILIES[getattr(args, "family", "mat")].config()
        wrong = [key for key in keys if not (is_recipe_key(key) if command == "train" else hasattr(config, key))]
        assert wrong == [], words


@pytest.mark.parametrize("name", ["multi30k_en_de_back_translation", "multi30k_en_de_distillation"])
def test_the_commands_in_a_recipe_are_accepted(name, tmp_path):
    """The commands write the data to the files that the recipe trains on."""
    lines = (PACKAGED / f"{name}.yaml").read_text(encoding="utf-8").splitlines()
    header = [line[1:] for line in lines if line.startswith("#")]
    code = "\n".join(line.strip() for line in header if line.startswith("     "))
    page = tmp_path / "page.md"
    page.write_text(f"```shell\n{code}\n```\n", encoding="utf-8")
    assert [command for command, *_ in commands(page)] == ["train", "translate"]
    test_every_command_is_accepted(page)
    data = load_recipe(name).data
    made = data.synthetic or data.train
    for language in ("en", "de"):
        assert f" $HF_DEEPWIDE_DATA/{made}.{language}" in code


def is_recipe_key(key: str) -> bool:
    """Whether a dotted key is a key of a recipe, for any of the three tasks."""
    section, _, name = key.partition(".")
    return any(name in properties.get(section, {}).get("properties", {}) for properties in PROPERTIES)


def named_keys(page: Path) -> list[str]:
    """The keys of recipes that a page names."""
    return re.findall(rf"`(?:--)?((?:{'|'.join(PROPERTIES[0])})\.\w+)[:= `]", page.read_text(encoding="utf-8"))


@each_page
def test_every_recipe_key_exists(page):
    for key in named_keys(page):
        assert is_recipe_key(key) or key == "model.safetensors", key


def named_classes(page: Path) -> list[str]:
    """Names between backticks that look like names of classes."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    return re.findall(r"`((?:[A-Z]\w*)?[A-Z][a-z]\w+)`", text)


@each_page
def test_every_class_exists(page):
    """Each class is defined in this repository, in Transformers or in Python."""
    code = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "src").rglob("*.py"))
    for name in named_classes(page):
        assert (
            re.search(rf"^class {name}\b", code, flags=re.MULTILINE)
            or hasattr(transformers, name)
            or hasattr(builtins, name)
        ), name


@pytest.mark.parametrize("name", ["models", "layers"])
def test_every_field_of_the_models_pages_exists(name):
    """The fields are those in the last column of the tables."""
    page = ROOT / "docs" / f"{name}.md"
    fields = {name for family in FAMILIES.values() for name in vars(family.config())}
    rows = re.findall(r"^\|.*\| (.*) \|$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    names = [name for row in rows for name in re.findall(r"`([\w.]+)(?:: \w+)?`", row)]
    assert len(names) > 20
    assert [name for name in names if name not in fields and not is_recipe_key(name)] == []


@pytest.mark.parametrize("found", [named_files, named_keys, named_classes])
def test_what_pages_name_is_found(found):
    """The tests above check what these functions find, and would pass if they found nothing."""
    assert sum(len(found(page)) for page in PAGES) > 30


def test_every_make_target_and_extra_exists():
    text = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    printed = [block for page in PAGES for block in blocks(page, "shell")] + re.findall(r"`(make [\w-]+)`", text)
    targets = set(re.findall(r"^make ([\w-]+)", "\n".join(printed), flags=re.MULTILINE))
    assert {"quickstart", "test"} <= targets
    assert [target for target in targets if f"\n{target}:" not in makefile] == []
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    extras = {extra for group in re.findall(r"'\.\[([\w,]+)\]'", text) for extra in group.split(",")}
    assert {"dev", "phrases"} <= extras
    assert [extra for extra in extras if f"\n{extra} = [" not in project] == []


def test_readme_lists_every_family_and_every_page():
    text = PAGES[0].read_text(encoding="utf-8")
    assert re.findall(r"^\| `(\w+)` \| \[", text, flags=re.MULTILINE) == list(FAMILIES)
    assert {f"docs/{page.name}" for page in PAGES[1:]} <= set(links(PAGES[0]))
    assert len(text.splitlines()) <= 150


def test_the_oldest_versions_are_those_that_are_accepted():
    """A page names the versions, because a reader of a shared model does not see what the package requires."""
    page = (ROOT / "docs" / "sharing.md").read_text(encoding="utf-8")
    needed = [Requirement(line) for line in requires("hf_deepwide") or () if "extra ==" not in line]
    oldest = {each.name: next(iter(each.specifier)).version for each in needed if each.specifier}
    assert f"Transformers {oldest['transformers']} or newer" in page
    assert f"PyTorch {oldest['torch']} or newer" in page


def test_the_picture_is_up_to_date():
    assert families_picture.PICTURE.read_text(encoding="utf-8") == families_picture.picture()


def test_the_tables_of_recipe_keys_are_up_to_date():
    page = recipe_page.PAGE.read_text(encoding="utf-8")
    assert recipe_page.with_keys(page) == page
    shown = re.findall(r"^\| `(\w+)` \|", page, flags=re.MULTILINE)
    assert len(shown) > 100


def test_the_ways_in_which_a_page_can_be_wrong_are_found(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "# A b\n`hf-deepwide train quickstart --x 1`\n```shell\ncat a | hf-deepwide translate < b\n```\n[x](y.md)"
    )
    assert commands(page) == [["translate"], ["train", "quickstart", "--x", "1"]]
    assert links(page) == ["y.md"]
    assert anchors(page) == {"a-b"}
