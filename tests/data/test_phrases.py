"""The embedded corpus: the promised properties of its splits, and the same meaning in both languages."""

import calendar
import re
from random import Random

import pytest
from babel.dates import format_time

from hf_deepwide.data.corpora import DataArguments, load_parallel
from hf_deepwide.data.phrase_frames import FRAMES, LANGUAGES, NOUNS
from hf_deepwide.data.phrases import SLOTS, build_phrases, say, slots_of
from hf_deepwide.errors import UserError

SIZE = 4000


@pytest.fixture(scope="module")
def phrases():
    return build_phrases(train_size=SIZE)


def test_sizes_and_no_phrase_twice(phrases):
    assert {split: len(rows) for split, rows in phrases.items()} == {"train": SIZE, "validation": 500, "test": 500}
    for side in ("source", "target"):
        texts = [text.casefold() for rows in phrases.values() for text in rows[side]]
        assert len(set(texts)) == len(texts)


def test_held_out_phrases_are_made_of_known_parts(phrases):
    """Nearly all words and numbers of held-out phrases were trained on: what is new is their composition."""
    for side in ("source", "target"):
        known = {word for text in phrases["train"][side] for word in re.findall(r"\w+", text)}
        words = [word for text in phrases["test"][side] for word in re.findall(r"\w+", text)]
        assert sum(word in known for word in words) > 0.97 * len(words)


def test_another_seed_is_another_corpus_and_train_size_leaves_the_test_set_alone(phrases):
    smaller = build_phrases(train_size=50)
    assert smaller["test"][:] == phrases["test"][:]
    assert smaller["validation"][:] == phrases["validation"][:]
    assert smaller["train"][:] == phrases["train"][:50]
    assert not set(build_phrases(train_size=50, seed=2)["test"]["target"]) & set(phrases["test"]["target"])


@pytest.mark.parametrize("frame", FRAMES, ids=lambda frame: frame[1])
def test_every_frame_in_every_language(frame):
    assert len(frame) == len(LANGUAGES)
    assert all(sorted(slots_of((text,))) == sorted(slots_of(frame)) for text in frame)
    random = Random(7)
    for _ in range(5):
        meaning = {slot: SLOTS[slot].draw(random) for slot in slots_of(frame)}
        said = [say(frame, meaning, lang) for lang in LANGUAGES]
        for text in said:
            assert text[0].isupper() or text[0].isdigit()
            assert text == " ".join(text.split())
            assert not re.search(r"[{}\u00a0\u202f\u2009]", text)
        assert len(set(said)) == len(LANGUAGES)


def test_nouns_are_complete():
    assert all(len(noun) == len(LANGUAGES) for nouns in NOUNS.values() for noun in nouns)


def test_german_and_english_say_the_same(phrases):
    """Compare all dates and times of the training phrases by hand-written rules for the two languages."""
    months = ["Januar", "Februar", "März", "April", "Mai", "Juni", "Juli", "August", "September", "Oktober"]
    months += ["November", "Dezember"]
    dates = times = 0
    for row in phrases["train"]:
        for day, month, year in re.findall(r"(?<!–)\b(\d+)\. (\w+) (\d{4})", row["source"]):
            english = calendar.month_name[months.index(month) + 1]
            assert f"{english} {day}, {year}" in row["target"]
            dates += 1
        for hour, minute in re.findall(r"(?<!\d)(\d\d):(\d\d)", row["source"]):
            twelve, half = int(hour) % 12 or 12, "PM" if int(hour) >= 12 else "AM"
            assert f"{twelve}:{minute} {half}" in row["target"]
            times += 1
    assert dates > 300
    assert times > 300


@pytest.mark.parametrize(
    ("lang", "hour", "expected"),
    [
        ("es", 1, "a la 1:05"),
        ("es", 13, "a las 13:05"),
        ("cs", 3, "ve 3:05"),
        ("cs", 5, "v 5:05"),
        ("cs", 20, "ve 20:05"),
        ("de", 0, "um 00:05 Uhr"),
        ("en", 0, "at 12:05\u202fAM"),
        ("fr", 14, "à 14:05"),
    ],
)
def test_the_hour_changes_its_preposition(lang, hour, expected):
    clock = SLOTS["at_time"].draw(Random(0)).replace(hour=hour, minute=5)
    assert SLOTS["at_time"].say(clock, lang) == expected
    assert format_time(clock, "short", locale=lang) in expected


def test_spanish_and_before_an_i():
    assert SLOTS["countries"].say(["CU", "IE"], "es") == "Cuba e Irlanda"
    assert SLOTS["countries"].say(["IE", "CU"], "es") == "Irlanda y Cuba"


@pytest.mark.parametrize("pair", [("fr", "cs"), ("en", "es")])
def test_other_languages_have_the_same_meanings(pair, phrases):
    other = build_phrases(*pair, train_size=10)
    assert len(other["test"]) == 500
    german = build_phrases("de", pair[1], train_size=10)["test"]["target"][:]
    assert len(set(german) & set(other["test"]["target"])) > 400


def test_load_parallel_gives_the_phrases(phrases):
    args = DataArguments(format="phrases", source_lang="de", target_lang="en", train_size=SIZE)
    assert load_parallel(args, "train")[:] == phrases["train"][:]
    assert load_parallel(args, "test")[:] == phrases["test"][:]


def test_unknown_language():
    with pytest.raises(UserError, match="no language 'xx'; available: de, en"):
        build_phrases("de", "xx")


@pytest.mark.parametrize("source_lang", ["de", "en"])
def test_phrases_that_differ_in_one_language_alone_are_left_out(monkeypatch, source_lang):
    """English distinguishes only 7 of 140 German sentences. Then phrases are exhausted, as the error reports."""
    monkeypatch.setattr("hf_deepwide.data.phrases.FRAMES", [("{name} {weekday}", *["{weekday}"] * 4)])
    with pytest.raises(UserError, match="exhausted after 7;"):
        build_phrases(source_lang, "en" if source_lang == "de" else "de", train_size=99)
