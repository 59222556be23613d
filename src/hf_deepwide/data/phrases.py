"""The embedded corpus: phrases with dates, times, prices, ordinals, counts and lists, generated without a download.

The sentences are in `phrase_frames.py`. The values of their slots come from CLDR through Babel (dates, times,
currencies, units, lists, names of countries, cities and languages) and from num2words (spelled-out numbers). For each
phrase, a meaning is drawn, which is then expressed in both languages. So source and target differ only as the two
languages differ: "3. März 2026, um 14:30 Uhr" and "March 3, 2026 at 2:30 PM". Words and parts of dates recur, but
their combinations do not: a model that translates held-out phrases has learned to compose.
"""

import functools
import re
import string
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import date, time, timedelta
from random import Random
from typing import Any

from babel import Locale
from babel.dates import format_date, format_interval, format_skeleton, format_time, format_timedelta
from babel.lists import format_list
from babel.numbers import format_currency, format_decimal, format_percent
from babel.units import format_unit
from datasets import Dataset, DatasetDict
from num2words import num2words

from ..errors import UserError, quote
from .phrase_frames import CITIES, CURRENCIES, FRAMES, LANGUAGE_CODES, LANGUAGES, NAMES, NOUNS, TERRITORIES

HELD_OUT = 500  # pairs in each of validation and test


@functools.lru_cache(maxsize=4)
def build_phrases(
    source_lang: str = "de", target_lang: str = "en", train_size: int = 25_000, seed: int = 1
) -> DatasetDict:
    """Generate train, validation and test with the columns `source` and `target`, always the same for one seed.

    No source and no target occurs twice, within a split or across splits. Validation and test do not depend on
    `train_size`. Another version of Babel or num2words may give other words for some phrases.

    Raises:
        UserError: a language is unknown, or `train_size` is larger than the number of different phrases.
    """
    for lang in (source_lang, target_lang):
        if lang not in LANGUAGES:
            raise UserError(f"the embedded phrases have no language {quote(lang)}; available: {', '.join(LANGUAGES)}")
    pairs = _distinct_pairs(source_lang, target_lang, seed)
    sizes = {
        "validation": HELD_OUT,
        "test": HELD_OUT,
        "train": train_size,
    }  # held-out first: see the docstring
    splits = {}
    for split, size in sizes.items():
        rows = [pair for pair, _ in zip(pairs, range(size), strict=False)]
        splits[split] = Dataset.from_dict({"source": [row[0] for row in rows], "target": [row[1] for row in rows]})
    return DatasetDict({split: splits[split] for split in ("train", "validation", "test")})


def _distinct_pairs(source_lang: str, target_lang: str, seed: int) -> Iterator[tuple[str, str]]:
    """Yield random phrases, but skip each phrase whose source or target, ignoring case, was drawn before.

    Raises:
        UserError: 1000 phrases in a row were skipped.
    """
    random = Random(seed)
    sources, targets = set(), set()
    repeated = 0
    while repeated < 1000:
        frame = random.choice(FRAMES)
        meaning = {slot: SLOTS[slot].draw(random) for slot in slots_of(frame)}
        source, target = say(frame, meaning, source_lang), say(frame, meaning, target_lang)
        if source.casefold() in sources or target.casefold() in targets:
            repeated += 1
            continue
        repeated = 0
        sources.add(source.casefold())
        targets.add(target.casefold())
        yield source, target
    raise UserError(f"the embedded phrases are exhausted after {len(sources)}; lower data.train_size")


def slots_of(frame: tuple[str, ...]) -> list[str]:
    """Return the slots of a frame, in the order of its first language."""
    return [slot for _, slot, _, _ in string.Formatter().parse(frame[0]) if slot]


def say(frame: tuple[str, ...], meaning: dict[str, Any], lang: str) -> str:
    """Write a frame in `lang`, with plain spaces (CLDR has three narrower kinds) and a capital first letter."""
    said = {slot: SLOTS[slot].say(value, lang) for slot, value in meaning.items()}
    text = " ".join(frame[LANGUAGES.index(lang)].format(**said).split())
    return text[0].upper() + text[1:]


@dataclass(frozen=True)
class Slot:
    """A function that draws a value, and a function that writes the value in a language."""

    draw: Callable[[Random], Any]
    say: Callable[[Any, str], str]


def _day(first: int, last: int) -> Callable[[Random], date]:
    """Return a function that draws a day from the years `first` to `last`."""
    start, end = date(first, 1, 1).toordinal(), date(last, 12, 31).toordinal()
    return lambda random: date.fromordinal(random.randint(start, end))


def _clock(first: int, last: int) -> Callable[[Random], time]:
    """Return a function that draws a time of day from hour `first` to hour `last`, in steps of five minutes."""
    return lambda random: time(random.randint(first, last), random.randrange(0, 60, 5))


def _weekday(day: date, lang: str) -> str:
    name = format_date(day, "EEEE", locale=lang)
    if lang == "cs":  # the accusative, and the "v" that becomes "ve" before some consonants
        name = {"středa": "středu", "sobota": "sobotu", "neděle": "neděli"}.get(name, name)
        return f"{'ve' if name in ('středu', 'čtvrtek') else 'v'} {name}"
    return {"de": "am", "en": "on", "fr": "le", "es": "el"}[lang] + " " + name


def _on_date(day: date, lang: str) -> str:
    separator = " " if lang in ("fr", "cs") else ", "
    return f"{_weekday(day, lang)}{separator}{format_date(day, 'long', locale=lang)}"


def _at_time(clock: time, lang: str) -> str:
    said = format_time(clock, "short", locale=lang)
    if lang == "cs":
        return f"{'ve' if clock.hour in (2, 3, 4, 12, 13, 14, 20, 21, 22, 23) else 'v'} {said}"
    if lang == "es":
        return f"{'a la' if clock.hour == 1 else 'a las'} {said}"
    return {"de": "um {} Uhr", "en": "at {}", "fr": "à {}"}[lang].format(said)


def _interval(days: tuple[date, date], lang: str) -> str:
    return format_interval(*days, "yMMMd", locale=lang)


def _draw_interval(random: Random) -> tuple[date, date]:
    first = random.randint(1, 20)
    year, month = random.randint(1990, 2049), random.randint(1, 12)
    return date(year, month, first), date(year, month, random.randint(first + 1, 28))


def _draw_span(random: Random) -> tuple[str, int]:
    unit = random.choice(["minute", "hour", "day"])
    return unit, random.randint(2, {"minute": 59, "hour": 23, "day": 30}[unit])


def _span(direction: int) -> Callable[[tuple[str, int], str], str]:
    """Return a function that writes a time in the future (1) or the past (-1) in the unit that was drawn."""

    def say_span(span: tuple[str, int], lang: str) -> str:
        unit, count = span
        delta = timedelta(**{f"{unit}s": direction * count})
        return format_timedelta(delta, unit, threshold=10**6, add_direction=True, locale=lang)

    return say_span


def _price(low: int, high: int, currencies: str) -> Slot:
    """Return a slot for prices from low to high, uniform on a log scale, often with cents that are usual in shops."""

    def draw(random: Random) -> tuple[float, str]:
        cents = random.choice([0, 50, 90, 95, 99, random.randrange(100)])
        return _log_uniform(random, low, high) + cents / 100, random.choice(currencies.split())

    return Slot(draw, lambda price, lang: format_currency(*price, locale=lang))


def _log_uniform(random: Random, low: int, high: int) -> int:
    return int(low * (high / low) ** random.random())


def _percent(share: float, lang: str) -> str:
    pattern = Locale.parse(lang).percent_formats[None].pattern  # "#,##0 %" has whole percents only
    return format_percent(share, pattern.replace("0", "0.#"), locale=lang)


def _measure(low: int, high: int, *units: str, halves: bool = False) -> Slot:
    """Return a slot for measures from low to high in one of the CLDR units, with `halves` some with a half."""

    def draw(random: Random) -> tuple[float, str]:
        half = random.choice([0, 0, 0.5]) if halves else 0
        return _log_uniform(random, low, high) + half, random.choice(units)

    return Slot(draw, lambda measure, lang: format_unit(*measure, locale=lang))


def _words(number: int, lang: str) -> str:
    return num2words(number, lang=lang)


def _ordinal(number: int, lang: str) -> str:
    # num2words has no Czech ordinals; Czech mostly writes them as digits with a full stop.
    return f"{number}." if lang == "cs" else num2words(number, lang=lang, to="ordinal")


def _city(city: str, lang: str) -> str:
    zone = Locale.parse(lang).time_zones.get(f"Europe/{city}", {})
    return zone.get("city", city)  # CLDR lists only names that differ from the name of the zone


def _listing(codes: list[str], low: int, high: int, name: Callable[[str, str], str]) -> Slot:
    """Return a slot for lists of low to high different items, joined as is usual in the language."""

    def say_list(chosen: list[str], lang: str) -> str:
        said = format_list([name(code, lang) for code in chosen], locale=lang)
        return re.sub(r" y (?=h?i)", " e ", said, flags=re.IGNORECASE) if lang == "es" else said  # "Cuba e Irlanda"

    return Slot(lambda random: random.sample(codes, random.randint(low, high)), say_list)


def _noun(kind: str) -> Slot:
    return Slot(lambda random: random.choice(NOUNS[kind]), lambda noun, lang: noun[LANGUAGES.index(lang)])


SLOTS = {
    "on_date": Slot(_day(1990, 2049), _on_date),
    "since": Slot(_day(1970, 2019), lambda day, lang: format_date(day, "long", locale=lang)),
    "until": Slot(_day(2020, 2049), lambda day, lang: format_date(day, "long", locale=lang)),
    "short_date": Slot(_day(1950, 2049), lambda day, lang: format_date(day, "medium", locale=lang)),
    "day": Slot(_day(2020, 2020), lambda day, lang: format_skeleton("MMMMd", day, locale=lang)),
    "month": Slot(_day(1970, 2049), lambda day, lang: format_skeleton("yMMMM", day, locale=lang)),
    "interval": Slot(_draw_interval, _interval),
    "weekday": Slot(_day(2024, 2024), _weekday),
    "at_time": Slot(_clock(0, 23), _at_time),
    "opens": Slot(_clock(8, 11), lambda clock, lang: format_time(clock, "short", locale=lang)),
    "closes": Slot(_clock(12, 21), lambda clock, lang: format_time(clock, "short", locale=lang)),
    "soon": Slot(_draw_span, _span(1)),
    "ago": Slot(_draw_span, _span(-1)),
    "price": _price(10, 20_000, CURRENCIES),
    "cost": _price(5, 500, CURRENCIES),
    "euros": _price(300, 3000, "EUR"),
    "old_euros": _price(300, 3000, "EUR"),
    "percent": Slot(lambda random: random.randint(10, 995) / 1000, _percent),
    "distance": _measure(80, 3000, "length-kilometer"),
    "run": _measure(2, 42, "length-kilometer", halves=True),
    "mass": _measure(2, 900, "mass-kilogram", "mass-gram"),
    "purchase": _measure(2, 20, "mass-kilogram", halves=True),
    "volume": _measure(5, 900, "volume-liter", halves=True),
    "area": _measure(20, 300, "area-square-meter", halves=True),
    "speed": _measure(5, 150, "speed-kilometer-per-hour"),
    "temperature": _measure(5, 40, "temperature-celsius", halves=True),
    "duration": _measure(15, 240, "duration-minute"),
    "crowd": Slot(lambda random: random.randint(1000, 99_999), lambda count, lang: format_decimal(count, locale=lang)),
    "ordinal": Slot(lambda random: random.randint(2, 99), _ordinal),
    "number": Slot(lambda random: random.randint(13, 999), _words),
    "quantity": Slot(lambda random: random.randint(13, 999), lambda count, lang: f"{count} ({_words(count, lang)})"),
    "year": Slot(lambda random: random.randint(1700, 1999), lambda year, lang: num2words(year, lang=lang, to="year")),
    "name": Slot(lambda random: random.choice(NAMES.split()), lambda name, lang: name),
    "town": Slot(lambda random: random.choice(CITIES.split()), _city),
    "route": Slot(
        lambda random: random.sample(CITIES.split(), 2),
        lambda ends, lang: " – ".join(_city(end, lang) for end in ends),
    ),
    "towns": _listing(CITIES.split(), 2, 4, _city),
    "countries": _listing(TERRITORIES.split(), 2, 4, lambda code, lang: Locale.parse(lang).territories[code]),
    "languages": _listing(LANGUAGE_CODES.split(), 2, 4, lambda code, lang: Locale.parse(lang).languages[code]),
    **{kind: _noun(kind) for kind in NOUNS},
}
