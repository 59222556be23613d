"""Language codes: the same language in two letters, in three letters, and with a script or a country."""

import difflib
import re
from collections.abc import Iterable

# Two-letter codes, and NLLB's three-letter codes. Languages whose two codes begin alike (de, deu) may be left out.
THREE_LETTERS = {
    "be": "bel", "bg": "bul", "bm": "bam", "bn": "ben", "bs": "bos", "cs": "ces", "da": "dan", "ee": "ewe",
    "eo": "epo", "es": "spa", "et": "est", "fa": "pes", "ff": "fuv", "fj": "fij", "fo": "fao", "ga": "gle",
    "gd": "gla", "gl": "glg", "gn": "grn", "he": "heb", "hr": "hrv", "ht": "hat", "hy": "hye", "id": "ind",
    "ig": "ibo", "is": "isl", "ja": "jpn", "jv": "jav", "ka": "kat", "kg": "kon", "kk": "kaz", "km": "khm",
    "kn": "kan", "ks": "kas", "ku": "kmr", "ky": "kir", "lb": "ltz", "lg": "lug", "ln": "lin", "lo": "lao",
    "lt": "lit", "mg": "plt", "mi": "mri", "mk": "mkd", "ml": "mal", "mn": "khk", "mr": "mar", "ms": "zsm",
    "mt": "mlt", "my": "mya", "nb": "nob", "ne": "npi", "nl": "nld", "no": "nob", "om": "gaz", "pa": "pan",
    "pl": "pol", "ps": "pbt", "pt": "por", "rn": "run", "rw": "kin", "sc": "srd", "sd": "snd", "sg": "sag",
    "sk": "slk", "sl": "slv", "sq": "als", "sr": "srp", "st": "sot", "sv": "swe", "ti": "tir", "tk": "tuk",
    "tl": "tgl", "tn": "tsn", "tr": "tur", "tt": "tat", "ug": "uig", "uk": "ukr", "yi": "ydd", "zh": "zho",
}  # fmt: skip


def nearest(language: str, known: Iterable[str]) -> list[str]:
    """Return at most three codes that the user may have meant: of the same language, else with a similar spelling."""
    known = sorted(known)
    wanted = _spellings(language)
    same = [code for code in known if wanted & _spellings(code)]
    similar = difflib.get_close_matches(language, same or known, n=3, cutoff=0.0 if same else 0.5)
    return similar or same[:3]


def _spellings(code: str) -> set[str]:
    """Return a language's codes in two and in three letters: "cs" and "ces" for "cs_CZ", and for "ces_Latn".

    For three letters that the table lacks, the two-letter code is the first two letters.
    """
    language = re.split(r"[-_]", code.lower())[0]
    if len(language) == 2:
        return {language, THREE_LETTERS.get(language, language)}
    short = {two for two, three in THREE_LETTERS.items() if three == language}
    return {language, *(short or {language[:2]})}
