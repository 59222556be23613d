"""The command `hf-deepwide`, with one file for each subcommand.

This package is separate from the library: `import hf_deepwide` loads PyTorch, and `--help` need not wait for that. The
docstring of a subcommand's file is its manual. `configure` adds its arguments. `run` imports the modules it needs. A
file may also have `run_light`, which works without the library, and returns True if nothing is left to do.
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
    """Run the subcommand `command`, or the first word of the command line; Ctrl-C ends it with one word.

    Characters that the terminal cannot encode are printed as escapes such as \\u2026.
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
    """Find the subcommand, read its arguments, and run it."""
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
        except OSError as error:  # `run` meets the same error, and reports it in one line
            if error.errno == errno.ENOSPC:  # except on standard output, which reports only its first error
                raise
        execute(lambda: module.run(args))


def execute(run: Callable[[], None]) -> None:
    """Set up logging, call `run`, and leave the process group; an error of the user is reported in one line."""
    from transformers.utils.logging import disable_progress_bar

    from hf_deepwide.errors import run_script
    from hf_deepwide.training.process_group import leaving_process_group

    disable_progress_bar()  # the bar for loading and saving weights, which is fast
    first = os.environ.get("RANK", "0") == "0"  # of several processes, only rank 0 logs
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    logging.getLogger("hf_deepwide").setLevel(logging.INFO if first else logging.ERROR)
    # each process has its own largest batch, so every process reports it
    logging.getLogger("hf_deepwide.training.out_of_memory").setLevel(logging.INFO if first else logging.WARNING)

    def run_and_leave() -> None:
        with leaving_process_group():
            run()
            sys.stdout.flush()

    run_script(run_and_leave)


class Output:
    """Standard output that raises no error when its reader, such as `head`, has ended: later output is dropped.

    Any other error, such as a full disk, is raised once, and later output is dropped, too.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write like a text stream."""
        return self._unless_broken(lambda: self._stream.write(text)) or 0

    def flush(self) -> None:
        """Flush like a text stream."""
        self._unless_broken(self._stream.flush)

    def _unless_broken(self, do: Callable[[], int | None]) -> int | None:
        try:
            return do()
        except OSError as error:
            os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())  # for all later output
            if not isinstance(error, BrokenPipeError):
                raise
            return None


def with_or_without_reader(run: Callable[[], object]) -> object:
    """Return the result of `run`, which goes on and writes its files even if the reader of its output ends early."""
    with open(os.devnull, "w", encoding="utf-8") as nowhere:
        output = cast(TextIO, Output(sys.stdout or nowhere))  # None: stdout is closed
        with redirect_stdout(output):
            try:
                return run()
            finally:
                output.flush()


def _first(words: list[str]) -> list[str]:
    """Return the words if the first one is a known subcommand; else exit with the help, the version or an error."""
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
