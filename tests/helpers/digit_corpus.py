"""A parallel corpus that takes no time to make: digits, and their German names."""

from pathlib import Path

SIZES = {"train": 40, "val": 7, "one": 5, "two": 3}
NAMES = ["null", "eins", "zwei", "drei", "vier", "fünf", "sechs", "sieben", "acht", "neun"]


def write_digits(folder: Path) -> Path:
    """Write the splits of `SIZES` to files such as `train.en` and `train.de`, and return the folder."""
    number = 0
    for split, size in SIZES.items():
        lines = [f"{number + line:04d}" for line in range(size)]
        number += size
        for language, words in (("en", "0123456789"), ("de", NAMES)):
            text = "".join(" ".join(words[int(digit)] for digit in line) + "\n" for line in lines)
            (folder / f"{split}.{language}").write_text(text, encoding="utf-8")
    return folder
