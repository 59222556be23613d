"""The demo's page in a real browser: it translates, draws, survives bad input, and contacts only its own server."""

import os
import re
from urllib.parse import urlsplit

import pytest
from demo_models import TEXTS, save
from paired_languages import build as build_pairs
from playwright.sync_api import expect, sync_playwright

from hf_deepwide.demo.page import MOST_CHARACTERS, build_page, launch
from hf_deepwide.evaluation.arguments import EvaluationArguments
from hf_deepwide.evaluation.checkpoint import load_translator
from hf_deepwide.evaluation.translate import translate

CHROMIUM = os.environ.get("CHROMIUM", "/usr/bin/chromium")
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-quic",
]
EVIL = "<script>window.broken = true</script><img src=x onerror='window.broken = true'>"
PATIENCE = 60_000  # milliseconds; the machine may be busy with other work
BEAMS = EvaluationArguments(num_beams=4)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    model, tokenizer = build_pairs("vanilla_transformer", "source")
    model.save_pretrained(root / "pairs")
    tokenizer.save_pretrained(root / "pairs")
    return [save(root / "mat", "mat", attention_branches=3), root / "pairs"]


@pytest.fixture(scope="module")
def url(folders):
    page = build_page(folders)
    yield launch(page)
    page.close()


@pytest.fixture(scope="module")
def browser():
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture
def page(browser, url):
    page = browser.new_page()
    page.set_default_timeout(PATIENCE)
    expect.set_options(timeout=PATIENCE)
    hosts, problems = set(), []
    page.on("request", lambda request: hosts.add(urlsplit(request.url).netloc))
    page.on("pageerror", lambda error: problems.append(error))
    page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
    page.goto(url)
    yield page
    page.close()
    assert hosts - {""} == {urlsplit(url).netloc}, "data: has no host"
    assert not problems


def ask(page, text):
    page.locator("#text textarea").fill(text)
    page.locator("#translate").click()


def translation(page, number):
    return page.locator(f"#system-{number} textarea")


def picture(page, number):
    return page.locator(f"#inside-{number} figure img").first


def choose(page, name, option):
    page.locator(f"{name} input").click()
    page.get_by_role("option", name=option).click()


def test_two_models_translate_side_by_side(page, folders):
    ask(page, "\n".join(TEXTS[:2]))
    for number, (folder, pair) in enumerate(zip(folders, [(None, None), ("en", "de")], strict=True), start=1):
        expected = translate(*load_translator(folder), TEXTS[:2], BEAMS, source_lang=pair[0], target_lang=pair[1])
        expect(translation(page, number)).to_have_value("\n".join(expected))
        expect(page.locator(f"#system-{number} .time")).to_contain_text("2 lines, 4 beams")
        expect(page.locator(f"#system-{number} .beams tbody tr")).to_have_count(8)
        expect(picture(page, number)).to_be_visible()
        assert picture(page, number).evaluate("image => image.naturalWidth") > 100
        assert "branch" in picture(page, number).get_attribute("alt") or number == 2
    left, right = (page.locator(f"#system-{number}").bounding_box() for number in (1, 2))
    assert left["y"] == right["y"]
    assert left["x"] + left["width"] <= right["x"]


def test_language_line_and_layer_are_chosen(page, folders):
    choose(page, "#to", "fr")
    ask(page, "\n".join(TEXTS[:2]))
    expected = translate(*load_translator(folders[1]), TEXTS[:2], BEAMS, source_lang="en", target_lang="fr")
    expect(translation(page, 2)).to_have_value("\n".join(expected))
    expect(page.locator("#system-1 .note")).to_contain_text("do not apply")
    first = picture(page, 1).get_attribute("src")
    choose(page, "#line", TEXTS[1])
    expect(picture(page, 1)).not_to_have_attribute("src", first)
    second = picture(page, 1).get_attribute("src")
    choose(page, "#inside-1", "decoder layer 1")
    expect(picture(page, 1)).not_to_have_attribute("src", second)
    expect(picture(page, 1)).to_have_attribute("alt", re.compile("decoder layer 1"))


def test_text_is_shown_as_text(page):
    ask(page, f"{EVIL}\n{TEXTS[0]}")
    expect(picture(page, 2)).to_be_visible()
    assert page.locator("#line input").input_value().startswith("1: <script>window")
    page.locator("#line input").click()
    expect(page.get_by_role("option", name="<script>window")).to_be_visible()
    assert page.evaluate("window.broken") is None
    assert page.locator("img[onerror]").count() == 0


def test_bad_input_is_one_line_and_the_next_text_works(page):
    for text, said in (("", "Write a text"), ("x" * (MOST_CHARACTERS + 1), "characters")):
        ask(page, text)
        expect(page.locator("#status .problem")).to_contain_text(said)
        expect(translation(page, 1)).to_have_value("")
    ask(page, TEXTS[0])
    expect(picture(page, 1)).to_be_visible()
    expect(page.locator("#status .problem")).to_have_count(0)


def test_two_readers_are_served(page, browser, url, folders):
    other = browser.new_page()
    other.set_default_timeout(PATIENCE)
    other.goto(url)
    ask(page, TEXTS[0])
    ask(other, TEXTS[1])
    for reader, text in ((page, TEXTS[0]), (other, TEXTS[1])):
        expect(picture(reader, 2)).to_be_visible()
        expect(translation(reader, 1)).to_have_value(translate(*load_translator(folders[0]), [text], BEAMS)[0])
    other.close()
