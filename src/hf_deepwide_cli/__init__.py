"""The command `hf-deepwide`, one file a subcommand.

This package lies beside the library: `import hf_deepwide` loads PyTorch, and `--help` need not wait for it. The
docstring of a subcommand's file is its manual. `configure` adds its arguments. `run` imports what it needs. A file may
also have `run_light`: it does what needs no library, and returns True if nothing is left to do.
"""

import difflib
import errno
import io
import logging
import os
import signal
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from importlib import import_module
from typing import Any, TextIO, cast

from .parser import Parser, split_overrides

COMMANDS = {
    "data": "prepare a corpus of the papers, from the Hub or from files",
    "train": "train a model by a recipe: tokenizer, training, scores, model card",
    "translate": "translate files or standard input",
    "score": "score translations by their probability under a model",
    "evaluate": "score a checkpoint or a file of translations",
    "compare": "test whether finished runs or translations differ",
    "init": "start a model of one of our families from a trained one",
    "convert": "turn a checkpoint of fairseq into a checkpoint of this library",
    "prune": "make a plain model of the layers that latent depth has chosen",
    "average": "average the weights of checkpoints",
    "share": "write a folder for the Hugging Face Hub, or upload it",
    "demo": "show a page that translates with models side by side",
    "export": "write a model for CTranslate2 or ONNX",
    "plot": "draw learning curves, layers in use, joints or path weights",
    "replay": "repeat a training step whose loss or gradient was NaN or infinite",
    "recipes": "list, show or copy the packaged recipes",
    "schema": "print the JSON schema of a recipe, for editors",
}


def main(command: str | None = None) -> None:
    """Run a subcommand: `command`, else the first word of the command line; Ctrl-C ends it in one word.

    Nothing that is printed is lost where the terminal knows fewer letters: the others are written as \\u2026.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        with_or_without_reader(lambda: run_subcommand(command))
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(128 + signal.SIGINT)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        print("error: the disk is full", file=sys.stderr)
        sys.exit(2)


def run_subcommand(command: str | None) -> None:
    """Find the subcommand, read its arguments, run it."""
    words = sys.argv[1:]
    if command is None:
        command, *words = _first(words)
    module = import_module(f".{command}", __name__)
    parser = Parser(prog=f"hf-deepwide {command}", description=module.__doc__)
    module.configure(parser)
    if getattr(module, "TAKES_OVERRIDES", False):
        args, overrides = split_overrides(parser, words)
        execute(lambda: module.run(args, overrides))
    else:
        args = parser.parse_args(words)
        try:
            if hasattr(module, "run_light") and module.run_light(args):
                sys.stdout.flush()
                return
        except OSError as error:  # goes wrong in `run`, too, which says it in one line
            if error.errno == errno.ENOSPC:  # of standard output, of which only the first error is told
                raise
        execute(lambda: module.run(args))


def execute(run: Callable[[], None]) -> None:
    """Run with logging set up; a mistake of the user's ends in one line; several processes part in good order."""
    from transformers.utils.logging import disable_progress_bar

    from hf_deepwide.errors import run_script
    from hf_deepwide.training.process_group import leaving_process_group

    disable_progress_bar()  # of loading and saving weights, which takes no time
    first = os.environ.get("RANK", "0") == "0"  # of several processes, one speaks
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    logging.getLogger("hf_deepwide").setLevel(logging.INFO if first else logging.ERROR)
    # each process has a largest batch of its own
    logging.getLogger("hf_deepwide.training.out_of_memory").setLevel(logging.INFO if first else logging.WARNING)

    def run_and_leave() -> None:
        with leaving_process_group():
            run()
            sys.stdout.flush()

    run_script(run_and_leave)


class Output:
    """Standard output that is no error without a reader: once `head` has stopped, what is printed goes nowhere.

    A disk that is full is an error once.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """As a text stream."""
        return self._unless_broken(lambda: self._stream.write(text)) or 0

    def flush(self) -> None:
        """As a text stream."""
        self._unless_broken(self._stream.flush)

    def _unless_broken(self, do: Callable[[], int | None]) -> int | None:
        try:
            return do()
        except OSError as error:
            os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())  # for what is printed from here on
            if not isinstance(error, BrokenPipeError):
                raise
            return None


def with_or_without_reader(run: Callable[[], object]) -> object:
    """Return what `run` returns. It goes on, and writes its files, if the reader of what it prints stops early."""
    with open(os.devnull, "w", encoding="utf-8") as nowhere:
        output = cast(TextIO, Output(sys.stdout or nowhere))  # None: it is closed
        with redirect_stdout(output):
            try:
                return run()
            finally:
                output.flush()


def _first(words: list[str]) -> list[str]:
    """The words, beginning with a known subcommand; anything else ends here, with help or one line."""
    if not words or words[0] in ("-h", "--help"):
        width = max(map(len, COMMANDS))
        listing = "\n".join(f"  {name:<{width}}  {what}" for name, what in COMMANDS.items())
        print(
            "Deep and wide Transformers for machine translation.\n\n"
            f"usage: hf-deepwide COMMAND …\n\n{listing}\n\nhf-deepwide COMMAND --help says more."
        )
        raise SystemExit(0)
    if words[0] == "--version":
        from importlib.metadata import version

        print(version("hf_deepwide"))
        raise SystemExit(0)
    if words[0] not in COMMANDS:
        near = difflib.get_close_matches(words[0], COMMANDS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"accepted: {', '.join(COMMANDS)}"
        print(f"error: there is no command {words[0][:80]!r}; {hint}", file=sys.stderr)
        raise SystemExit(2)
    return words
