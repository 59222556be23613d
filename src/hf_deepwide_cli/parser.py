"""Options of the command line: two spellings, with dashes and with underscores, and dotted keys of recipes."""

import argparse
import difflib
import sys
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn


class Parser(argparse.ArgumentParser):
    """A parser to which `--repo-id` and `--repo_id` are the same option.

    The description keeps its line breaks: it is the docstring of the command.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"formatter_class": argparse.RawDescriptionHelpFormatter, "allow_abbrev": False, **options})

    def parse_known_args(self, args: Iterable[str] | None = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """As the parent."""
        words = sys.argv[1:] if args is None else args
        return super().parse_known_args([self.spell(word) for word in words], namespace)

    def spell(self, word: str) -> str:
        """A word of the command line; an option of this parser as the parser spells it."""
        name, equals, value = word.partition("=")
        spellings = {plain(option): option for option in self._option_string_actions}
        return f"{spellings.get(plain(name), name)}{equals}{value}" if word.startswith("--") else word

    def error(self, message: str) -> NoReturn:
        """End in one line, with the option that may have been meant."""
        words = message.partition("unrecognized arguments: ")[2].split()
        given = next((plain(word.partition("=")[0]) for word in words if word.startswith("--")), "")
        others = {plain(option) for option in self.options()} - {given}  # a sibling of `plot curves` may have it
        near = difflib.get_close_matches(given, others, n=1)
        meant = f"; did you mean {near[0]}?" if near else f"; `{self.prog} --help` lists the options"
        self.exit(2, f"error: {message}{meant}\n")

    def options(self) -> list[str]:
        """The options of this parser and of the parsers behind its words, such as `plot curves`."""
        further = [action.choices for action in self._actions if isinstance(action, argparse._SubParsersAction)]
        parsers = [parser for choices in further for parser in choices.values()]
        return [*self._option_string_actions, *(option for parser in parsers for option in parser.options())]

    def knows(self, word: str) -> bool:
        """True if a word of the command line is an option of this parser, in either spelling."""
        return self.spell(word).partition("=")[0] in self._option_string_actions


def plain(option: str) -> str:
    """An option with underscores behind its first two dashes: the spelling by which options are compared."""
    return option[:2] + option[2:].replace("-", "_")


def split_overrides(parser: Parser, words: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """The arguments of a command, and the overrides among them, which may stand before or behind the recipe.

    argparse alone would take the value of an option that it does not know for the recipe.
    """
    own, overrides, rest = [], [], list(words)
    while rest:
        word = rest.pop(0)
        if not word.startswith("--") or parser.knows(word):
            own.append(word)
            continue
        name = plain(word.partition("=")[0])
        if difflib.get_close_matches(name, map(plain, parser._option_string_actions), cutoff=0.85):
            parser.error(f"unrecognized arguments: {word}")  # a slip in an option of the command; keys are unlike them
        overrides.append(word)
        if "=" not in word and rest and not rest[0].startswith("--"):
            overrides.append(rest.pop(0))
    args, unknown = parser.parse_known_args(own)
    return args, overrides + unknown
