"""YAML as a recipe holds it: the core schema of YAML 1.2, within limits.

A value that is text to YAML 1.2 is text here: `no`, `1:30`, `1_000`, `0b1`, `2001-01-01`, `<<`, `=`. `010` is ten.
YAML 1.1, which PyYAML reads, makes eight of `010`, and ninety of `1:30`. `1e-3` is a number.
"""

import re
from typing import Any

import yaml

from ..errors import UserError, one_line, quote

LARGEST = 250_000  # bytes of a recipe; PyYAML reads some 200,000 a second
DEPTH = 20  # mappings and lists within one another
EXPANDED = 1_000_000  # characters of all values where each alias is written out
DIGITS = 100  # of a whole number

_PREFIX = "tag:yaml.org,2002:"
_NULL = re.compile(r"^(?:~|null|Null|NULL|)$")
_BOOL = re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$")
_INT = re.compile(r"^(?:[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+)$")
_FLOAT = re.compile(
    r"^[-+]?(?:[0-9]+\.[0-9]*|\.[0-9]+|[0-9]+(?=[eE]))(?:[eE][-+]?[0-9]+)?$"
    r"|^[-+]?\.(?:inf|Inf|INF)$|^\.(?:nan|NaN|NAN)$"
)
_CORE = (
    ("null", _NULL, ["~", "n", "N", ""]),
    ("bool", _BOOL, list("tTfF")),
    ("int", _INT, list("-+0123456789")),
    ("float", _FLOAT, list("-+.0123456789")),
)
_OTHER = re.compile("[\0\ud800-\udfff]")  # no file's name and no sentence holds these


class RecipeLoader(yaml.SafeLoader):
    """Plain values alone, whose number and depth are known before one of them is made."""

    yaml_implicit_resolvers: dict = {}
    yaml_constructors: dict = {None: yaml.SafeLoader.construct_undefined}
    _depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """As the parent, but only so deep: it calls itself for each level."""
        if self._depth > DEPTH:
            mark = self.peek_event().start_mark
            raise yaml.composer.ComposerError(None, None, f"more than {DEPTH} levels of values", mark)
        self._depth += 1
        try:
            return super().compose_node(parent, index)
        finally:
            self._depth -= 1

    def get_single_node(self) -> yaml.Node | None:
        """As the parent, but aliases may not make much of little, nor a value that contains itself."""
        node = super().get_single_node()
        if node is not None:
            self._expanded(node, {}, 0)
        return node

    def _expanded(self, node: yaml.Node, sizes: dict[int, int], depth: int) -> int:
        """Characters of a node where each alias is written out; `sizes` are those of nodes seen before."""
        if id(node) in sizes and sizes[id(node)] < 0:
            problem = "a value contains itself"
        elif depth > DEPTH:
            problem = f"more than {DEPTH} levels of values"
        elif isinstance(node, yaml.ScalarNode):
            return len(node.value) + 1
        elif id(node) in sizes:
            return sizes[id(node)]
        else:
            sizes[id(node)] = -1
            pairs = isinstance(node, yaml.MappingNode)
            members = [part for pair in node.value for part in pair] if pairs else node.value
            size = 1 + sum(self._expanded(member, sizes, depth + 1) for member in members)
            sizes[id(node)] = size
            if size <= EXPANDED:
                return size
            problem = f"the aliases make more than {EXPANDED:,} characters"
        raise yaml.composer.ComposerError(None, None, problem, node.start_mark)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        """As the parent, but keys are text, and a key that is given twice is an error, not lost silently."""
        mapping: dict[str, Any] = {}
        for key_node, value_node in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, str):
                problem = f"the key {quote(key)} is no text; put it in quotation marks"
            elif key in mapping:
                problem = f"the key {quote(key)} is given twice"
            else:
                mapping[key] = self.construct_object(value_node, deep=True)
                continue
            raise yaml.constructor.ConstructorError(None, None, problem, key_node.start_mark)
        return mapping

    def _mapping(self, node: yaml.Node) -> dict:
        self._want(node, yaml.MappingNode, "a mapping")
        return self.construct_mapping(node)

    def _list(self, node: yaml.Node) -> list:
        self._want(node, yaml.SequenceNode, "a list")
        return [self.construct_object(member, deep=True) for member in node.value]

    def _text(self, node: yaml.Node) -> str:
        text = self.construct_scalar(node)
        if found := _OTHER.search(text):
            self._refuse(node, f"U+{ord(found[0]):04X} is no character of a text")
        return text

    def _null(self, node: yaml.Node) -> None:
        self._want(node, _NULL, "null")

    def _bool(self, node: yaml.Node) -> bool:
        self._want(node, _BOOL, "true or false")
        return node.value.lower() == "true"

    def _int(self, node: yaml.Node) -> int:
        self._want(node, _INT, "a whole number")
        if len(node.value) > DIGITS:
            self._refuse(node, f"a number of {len(node.value):,} digits; accepted: {DIGITS} at most")
        return int(node.value, {"0o": 8, "0x": 16}.get(node.value[:2], 10))

    def _float(self, node: yaml.Node) -> float:
        if not (isinstance(node, yaml.ScalarNode) and _INT.match(node.value)):
            self._want(node, _FLOAT, "a number")
        return float(re.sub(r"\.(?=[inIN])", "", node.value))

    def _want(self, node: yaml.Node, wanted: type[yaml.Node] | re.Pattern, name: str) -> None:
        """Refuse a node of another kind than its tag says."""
        if isinstance(wanted, re.Pattern):
            fits = isinstance(node, yaml.ScalarNode) and wanted.match(node.value)
        else:
            fits = isinstance(node, wanted)
        if not fits:
            self._refuse(node, f"{quote(node.value if isinstance(node, yaml.ScalarNode) else node.id)} is not {name}")

    def _refuse(self, node: yaml.Node, problem: str) -> None:
        raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)


for _name, _pattern, _first in _CORE:
    RecipeLoader.add_implicit_resolver(_PREFIX + _name, _pattern, _first)
for _name, _construct in (
    ("null", RecipeLoader._null),
    ("bool", RecipeLoader._bool),
    ("int", RecipeLoader._int),
    ("float", RecipeLoader._float),
    ("str", RecipeLoader._text),
    ("seq", RecipeLoader._list),
    ("map", RecipeLoader._mapping),
):
    RecipeLoader.add_constructor(_PREFIX + _name, _construct)


class RecipeDumper(yaml.SafeDumper):
    """Puts text in quotation marks that YAML 1.1 or the core schema of 1.2 would read as something else."""

    def represent_str(self, text: str) -> yaml.ScalarNode:
        """As the parent, but line ends other than "\\n" are escaped, as single quotes make spaces of them."""
        style = '"' if re.search("[\r\x85\u2028\u2029]", text) else None
        return self.represent_scalar(_PREFIX + "str", text, style)


for _name, _pattern, _first in _CORE:
    RecipeDumper.add_implicit_resolver(_PREFIX + _name, _pattern, _first)
RecipeDumper.add_representer(str, RecipeDumper.represent_str)


def to_yaml(values: Any) -> str:
    """Write a recipe's values as they are kept."""
    return yaml.dump(values, Dumper=RecipeDumper, sort_keys=False, allow_unicode=True)


def parse_yaml(text: str, source: str) -> Any:
    """Parse YAML.

    Raises:
        UserError: no YAML, or over a limit of this module; the message names `source` and the line.
    """
    if len(text) > LARGEST:
        raise UserError(f"{source}: {len(text):,} characters; accepted: {LARGEST:,} at most")
    try:
        return yaml.load(text, RecipeLoader)
    except yaml.MarkedYAMLError as error:
        line = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise UserError(f"{source}{line}: {one_line(error.problem)}") from error
    except yaml.YAMLError as error:
        raise UserError(f"{source}: not YAML: {one_line(error)}") from error
