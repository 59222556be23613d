"""Options of the command line: two spellings, with dashes and with underscores, and dotted keys of recipes."""

import argparse
import difflib
import sys
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn


class Parser(argparse.ArgumentParser):
    """A parser that takes `--repo-id` and `--repo_id` as the same option.

    The description keeps its line breaks: it is the docstring of the command.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"formatter_class": argparse.RawDescriptionHelpFormatter, "allow_abbrev": False, **options})

    def parse_known_args(self, args: Iterable[str] | None = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Parse as the parent class does, with options in either spelling."""
        words = sys.argv[1:] if args is None else args
        return super().parse_known_args([self.spell(word) for word in words], namespace)

    def spell(self, word: str) -> str:
        """Return a word of the command line; an option of this parser in the parser's own spelling."""
        name, equals, value = word.partition("=")
        spellings = {plain(option): option for option in self._option_string_actions}
        return f"{spellings.get(plain(name), name)}{equals}{value}" if word.startswith("--") else word

    def error(self, message: str) -> NoReturn:
        """Exit with a message of one line, which suggests a similar option."""
        words = message.partition("unrecognized arguments: ")[2].split()
        given = next((plain(word.partition("=")[0]) for word in words if word.startswith("--")), "")
        others = {plain(option) for option in self.options()} - {given}  # another kind of `plot` may have `given`
        near = difflib.get_close_matches(given, others, n=1)
        meant = f"; did you mean {near[0]}?" if near else f"; `{self.prog} --help` lists the options"
        self.exit(2, f"error: {message}{meant}\n")

    def options(self) -> list[str]:
        """The options of this parser and of its subparsers, such as `plot curves`."""
        further = [action.choices for action in self._actions if isinstance(action, argparse._SubParsersAction)]
        parsers = [parser for choices in further for parser in choices.values()]
        return [*self._option_string_actions, *(option for parser in parsers for option in parser.options())]

    def knows(self, word: str) -> bool:
        """Return True if a word of the command line is an option of this parser, in either spelling."""
        return self.spell(word).partition("=")[0] in self._option_string_actions


def plain(option: str) -> str:
    """Return an option with underscores after its first two dashes: the spelling for comparing options."""
    return option[:2] + option[2:].replace("-", "_")


def split_overrides(parser: Parser, words: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Return the arguments of a command, and separately the overrides, which may stand before or after the recipe.

    argparse alone would take the value of an unknown option for the recipe.
    """
    own, overrides, rest = [], [], list(words)
    while rest:
        word = rest.pop(0)
        if not word.startswith("--") or parser.knows(word):
            own.append(word)
            continue
        name = plain(word.partition("=")[0])
        if difflib.get_close_matches(name, map(plain, parser._option_string_actions), cutoff=0.85):
            parser.error(f"unrecognized arguments: {word}")  # a misspelt option; no key of a recipe is so similar
        overrides.append(word)
        if "=" not in word and rest and not rest[0].startswith("--"):
            overrides.append(rest.pop(0))
    args, unknown = parser.parse_known_args(own)
    return args, overrides + unknown
