"""Text files, read line by line, so that the lines of two languages stay aligned.

Only "\\n" ends a line; `str.splitlines` would also split at U+2028, form feeds and more. Each fault in a file is an
error that names the file and the line.
"""

import gzip
import io
import json
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import zip_longest
from pathlib import Path

from ..errors import UserError, one_line
from ..reading import check_file, what_is
from .arguments import where_paths_start

_NO_TEXT = re.compile("[\0\ud800-\udfff]")
LINE = 1_000_000  # most bytes of a line
BOMB, RATIO = 1 << 22, 100  # a gzip file may unpack to BOMB bytes or RATIO times its size


def read_lines(path: Path) -> Iterator[str]:
    """Yield the lines of a UTF-8 file (`.gz`: compressed) without line ends and byte order mark.

    Raises:
        UserError: the path is not a file, the file is empty, or a line is not UTF-8 text or has more than 1,000,000
            bytes.
    """
    check_file(path, "file")
    number = read = 0
    compressed = path.suffix == ".gz"
    most = max(BOMB, RATIO * path.stat().st_size) if compressed else None
    try:
        with gzip.open(path, "rb") if compressed else open(path, "rb") as file:
            lines = io.BufferedReader(file) if compressed else file
            # a binary file splits at b"\n" and nowhere else
            for number, raw in enumerate(iter(partial(lines.readline, LINE + 1), b""), start=1):
                read += len(raw)
                if most is not None and read > most:
                    raise UserError(
                        f"{path}, line {number}: the file unpacks to more than {RATIO} times its size, which is "
                        "unusual for text. Unpack it yourself if you want to train on it"
                    )
                yield decode_line(raw, path, number)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise UserError(
            f"{path}: not a complete gzip file ({error}; {number} lines were readable). Compress it again, "
            "or drop the .gz if it is plain text"
        ) from error
    if number == 0:
        raise UserError(f"{path} is empty; a split needs at least one line")


def decode_line(raw: bytes, path: Path, number: int) -> str:
    """Return the text of a line without its line end.

    Raises:
        UserError: the line is not UTF-8 text, or has more than 1,000,000 bytes. The message names `path` and `number`.
    """
    if len(raw) > LINE:
        raise UserError(f"{path}, line {number}: more than {LINE:,} bytes; write each sentence on a line of its own")
    try:
        text = raw.decode("utf-8-sig" if number == 1 else "utf-8")
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path}, line {number}: byte {error.start + 1} (0x{raw[error.start]:02x}) is not UTF-8. Text "
            "must be UTF-8, plain or, in a file named .gz, compressed"
        ) from error
    if "\0" in text:
        raise UserError(f"{path}, line {number}: a zero byte; this is not a UTF-8 text file (UTF-16? binary?)")
    return text.removesuffix("\n").removesuffix("\r")


def find_file(path: Path) -> Path:
    """Return `path`, or the same path with `.gz` if only this file exists.

    Raises:
        UserError: neither file exists, or the path is something else, such as a folder.
    """
    for candidate in (path, path.with_name(path.name + ".gz")):
        found = what_is(candidate)
        if found == "a file":
            return candidate
        if found is not None:
            raise UserError(
                f"no file {one_line(candidate)}: it is {found}; give a file, which can be read more than once"
            )
    raise UserError(f"no file {one_line(path)} or {one_line(path.name)}.gz. {where_paths_start()}")


def aligned(files: Sequence[Path], read: Callable[[Path], Iterator[str]] = read_lines) -> Iterator[tuple[str, ...]]:
    """Yield for each i the tuple of line i of all files; `read` returns the lines of a file.

    Raises:
        UserError: a file cannot be read, or has fewer lines than another.
    """
    ended: dict[int, int] = {}  # file that has ended: its number of lines
    number = 0
    for number, texts in enumerate(zip_longest(*map(read, files)), start=1):
        for index, text in enumerate(texts):
            if text is None:
                ended.setdefault(index, number - 1)
        if not ended:
            yield texts
    if ended:
        counts = [ended.get(index, number) for index in range(len(files))]
        short, long = counts.index(min(counts)), counts.index(max(counts))
        raise UserError(
            f"unequal line counts: {files[long]} has {counts[long]} lines but {files[short]} has {counts[short]}, so "
            f"line {counts[short] + 1} of the longer file has no partner. Both files must be aligned line by line"
        )


def json_rows(path: Path) -> Iterator[tuple[str, dict]]:
    """Yield for each line of a file its place, as messages name it, and its JSON object.

    Raises:
        UserError: the file cannot be read, or a line is not a JSON object.
    """
    for number, line in enumerate(read_lines(path), start=1):
        where = f"{path}, line {number}"
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            if not line.strip():
                raise UserError(f"{where}: the line is empty; remove it") from error
            array = "; a JSON array over several lines? Write one object a line" if line.lstrip()[0] == "[" else ""
            raise UserError(f"{where}: not JSON ({error.msg} at column {error.colno}){array}") from error
        except (ValueError, RecursionError) as error:  # thousands of digits or of nested brackets
            raise UserError(f"{where}: not JSON that can be read ({one_line(error)})") from error
        if not isinstance(row, dict):
            raise UserError(f"{where}: a JSON {type(row).__name__}; each line must be an object with the fields")
        yield where, row


def checked_characters(text: str, where: str) -> str:
    """Return the text if it has no zero byte and no half surrogate pair, which escapes in JSON can give.

    Raises:
        UserError: the text has one of them. The message begins with `where`.
    """
    if found := _NO_TEXT.search(text):
        what = "a zero byte" if found[0] == "\0" else "half a surrogate pair (\\ud800 to \\udfff)"
        raise UserError(f"{where}: {what} is no character")
    return text
