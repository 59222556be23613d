"""The YAML of recipes: the core schema of YAML 1.2, within limits.

A value that is text in YAML 1.2 is text here: `no`, `1:30`, `1_000`, `0b1`, `2001-01-01`, `<<`, `=`. `010` is ten.
PyYAML reads YAML 1.1, in which `010` is eight and `1:30` is ninety. `1e-3` is a number here.
"""

import re
from typing import Any

import yaml

from ..errors import UserError, one_line, quote

LARGEST = 250_000  # bytes of a recipe; PyYAML reads some 200,000 a second
DEPTH = 20  # mappings and lists within one another
EXPANDED = 1_000_000  # characters of all values, with each alias expanded
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
_OTHER = re.compile("[\0\ud800-\udfff]")  # no file name and no sentence holds these characters


class RecipeLoader(yaml.SafeLoader):
    """Load only plain values. Check their number and depth before any value is made."""

    yaml_implicit_resolvers: dict = {}
    yaml_constructors: dict = {None: yaml.SafeLoader.construct_undefined}
    _depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """Compose a node as the parent does, but limit the depth: the method calls itself for each level."""
        if self._depth > DEPTH:
            mark = self.peek_event().start_mark
            raise yaml.composer.ComposerError(None, None, f"more than {DEPTH} levels of values", mark)
        self._depth += 1
        try:
            return super().compose_node(parent, index)
        finally:
            self._depth -= 1

    def get_single_node(self) -> yaml.Node | None:
        """Get the node as the parent does. Refuse aliases that expand too far, and a value that contains itself."""
        node = super().get_single_node()
        if node is not None:
            self._expanded(node, {}, 0)
        return node

    def _expanded(self, node: yaml.Node, sizes: dict[int, int], depth: int) -> int:
        """Return the characters of a node with each alias expanded; `sizes` holds the sizes of nodes seen before."""
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
        """Make a mapping as the parent does, but refuse keys that are not text, and keys that are given twice."""
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
        """Refuse a node whose kind does not fit its tag."""
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
    """Put text in quotation marks if YAML 1.1 or the core schema of YAML 1.2 would read it as something else."""

    def represent_str(self, text: str) -> yaml.ScalarNode:
        """Write text as the parent does, but escape line ends except "\\n": single quotes would make them spaces."""
        style = '"' if re.search("[\r\x85\u2028\u2029]", text) else None
        return self.represent_scalar(_PREFIX + "str", text, style)


for _name, _pattern, _first in _CORE:
    RecipeDumper.add_implicit_resolver(_PREFIX + _name, _pattern, _first)
RecipeDumper.add_representer(str, RecipeDumper.represent_str)


def to_yaml(values: Any) -> str:
    """Return a recipe's values as the YAML that a run saves."""
    return yaml.dump(values, Dumper=RecipeDumper, sort_keys=False, allow_unicode=True)


def parse_yaml(text: str, source: str) -> Any:
    """Parse YAML.

    Raises:
        UserError: the text is not YAML, or exceeds a limit of this module; the message names `source` and the line.
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
