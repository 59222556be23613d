"""Reading files that the user names: their kind is checked before they are opened, and their size is limited."""

import json
import os
import stat
from pathlib import Path
from typing import Any

from .errors import UserError, one_line

_KINDS = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a named pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


def what_is(path: Path) -> str | None:
    """The kind of a path: `"a file"`, `"a folder"`, `"a named pipe"`, `"a socket"`, `"a device"`; None: nothing there.

    Opening a named pipe would wait for a process that writes into it, and reading a device may never end.
    """
    try:
        mode = os.stat(path).st_mode
    except (FileNotFoundError, NotADirectoryError, ValueError):  # ValueError: a zero byte in the path
        return None
    return next((name for holds, name in _KINDS if holds(mode)), "a file")


def check_file(path: Path, label: str) -> None:
    """Refuse a path that is no file that can be read to its end.

    Args:
        path: the file.
        label: the name of the file's kind in messages, such as "recipe".

    Raises:
        UserError: the path does not exist, or is a folder, a named pipe, a socket or a device.
    """
    found = what_is(path)
    if found is None:
        raise UserError(f"there is no {label} {one_line(path)}")
    if found != "a file":
        wanted = "give the name of a file" if label == "file" else f"a {label} is a file"
        raise UserError(f"{one_line(path)} is {found}; {wanted}")


def read_text(path: Path, label: str, most: int) -> str:
    """Read a UTF-8 text file of at most `most` bytes, without its byte order mark.

    Raises:
        UserError: the path is no file (`check_file`), or the file is larger or not UTF-8.
    """
    check_file(path, label)
    with open(path, "rb") as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise UserError(f"{one_line(path)}: a {label} has at most {most:,} bytes, and this file has more")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{one_line(path)} is no {label}: byte {error.start + 1} is not UTF-8 text") from error


def read_json(path: Path) -> Any:
    """The content of a JSON file that a program wrote.

    Raises:
        ValueError: the file is damaged; the message begins with its name.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path.name} is damaged, or no JSON ({one_line(error)})") from error


def home_expanded(path: str | Path, label: str) -> Path:
    """Replace `~` or `~name` at the start of a path by the home folder; an error message begins with `label`.

    Raises:
        UserError: no user of this name has a home folder.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise UserError(f"{label}: {one_line(path)}: nobody of this name has a home folder") from error


def folder_or_hub_id(name: str, label: str) -> str:
    """Return `name`, with `~` or `~name` at its start replaced by the home folder; see `home_expanded`.

    Raises:
        UserError: no user of this name has a home folder.
    """
    return str(home_expanded(name, label)) if name.startswith("~") else name
