"""Reads YAML as texts, lists and mappings, with the line of each, and builds no objects.

A value is text as it is written: what reads a key knows whether it means a number. So ``yes``, ``0644`` and ``12:30`` stay
what the author wrote. The parser's events are used, and nothing of its constructors.

Bounds: the size of a file, the depth of nesting, and the number of values once aliases are expanded. So a small file cannot
become a large tree.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import yaml

if TYPE_CHECKING:
    from collections.abc import Iterator

Path: TypeAlias = tuple[str | int, ...]
"""Where a value stands: the keys and the indexes (from 0) that lead to it."""
Tree: TypeAlias = "str | list[Tree] | dict[str, Tree] | None"

MOST_BYTES = 1 << 20
MOST_VALUES = 100_000
MOST_DEPTH = 40
_CORE = "tag:yaml.org,2002:"
_PLAIN_TAGS = frozenset({"!", *(_CORE + name for name in ("str", "int", "float", "bool", "null", "map", "seq"))})
_NOTHING = frozenset({"", "~", "null", "Null", "NULL"})
_MERGE = "<<"


class UnreadableYamlError(Exception):
    """The text cannot be read. ``line`` counts from 1; None where no line is to blame."""

    def __init__(self, line: int | None, text: str) -> None:
        super().__init__(text)
        self.line = line


class YamlTree(NamedTuple):
    """What a file says. ``lines`` has the line of each key and of each item of a list, by its path."""

    tree: Tree
    lines: dict[Path, int]


class _Node(NamedTuple):
    line: int
    value: str | list[_Node] | dict[str, tuple[int, _Node]] | None


def read_yaml(content: bytes) -> YamlTree:
    """Read one YAML document.

    :raises UnreadableYamlError: it is none, is beyond the bounds, or has what cannot be meant: a key twice, a foreign tag.
    """
    if len(content) > MOST_BYTES:
        raise UnreadableYamlError(None, f"the file has {len(content):,} bytes; allowed: at most {MOST_BYTES:,}")
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise UnreadableYamlError(
            line, f"byte {content[error.start]:#04x} is no UTF-8; allowed: text in UTF-8"
        ) from None
    try:
        root = _Composer(text).document()
    except yaml.MarkedYAMLError as error:
        raise _of_parser(error, text) from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        shown = f"{error.character:#x}" if isinstance(error.character, int) else repr(error.character)
        raise UnreadableYamlError(line, f"the character {shown} is not allowed in YAML; allowed: text") from None
    expansion = _Expansion()
    return YamlTree(expansion.plain(root, (), 0) if root is not None else None, expansion.lines)


def _of_parser(error: yaml.MarkedYAMLError, text: str) -> UnreadableYamlError:
    mark = error.problem_mark or error.context_mark
    line = None if mark is None else mark.line + 1
    if line is not None:
        lines = text.splitlines()
        written = lines[line - 1] if line <= len(lines) else ""
        if "\t" in written[: len(written) - len(written.lstrip())]:
            return UnreadableYamlError(line, "a tab indents this line; allowed: spaces")
    problem = " ".join(filter(None, (error.context, error.problem)))
    return UnreadableYamlError(line, f"this is no YAML: {problem}; allowed: `key: value` lines, indented by spaces")


class _Composer:
    """Builds nodes from the parser's events. An alias is the very node that its anchor names."""

    def __init__(self, text: str) -> None:
        loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
        self._events: Iterator[Any] = yaml.parse(text, Loader=loader)
        self._anchors: dict[str, _Node | None] = {}
        self._merged = 0

    def document(self) -> _Node | None:
        """Return the root; None if the text has no value."""
        root: _Node | None = None
        documents = 0
        for event in self._events:
            if isinstance(event, yaml.DocumentStartEvent):
                documents += 1
                if documents > 1:
                    raise UnreadableYamlError(_line(event), "a second document begins; allowed: one")
                root = self._node(next(self._events), 0)
        return root

    def _node(self, event: Any, depth: int) -> _Node:
        line = _line(event)
        if depth > MOST_DEPTH:
            raise UnreadableYamlError(line, f"values are nested too deeply; allowed: {MOST_DEPTH} levels")
        if isinstance(event, yaml.AliasEvent):
            return self._aliased(str(event.anchor), line)
        if event.tag is not None and event.tag not in _PLAIN_TAGS:
            raise UnreadableYamlError(line, f"the tag {event.tag} is not allowed; allowed: values without a tag")
        if event.anchor is not None:
            self._anchors[event.anchor] = None
        if isinstance(event, yaml.ScalarEvent):
            nothing = event.tag == f"{_CORE}null" or (event.implicit[0] and event.value in _NOTHING)
            node = _Node(line, None if nothing else event.value)
        elif isinstance(event, yaml.SequenceStartEvent):
            node = _Node(line, list(self._items(depth)))
        else:
            node = _Node(line, self._mapping(depth))
        if event.anchor is not None:
            self._anchors[event.anchor] = node
        return node

    def _aliased(self, anchor: str, line: int) -> _Node:
        if anchor not in self._anchors:
            raise UnreadableYamlError(
                line, f"the alias *{anchor} has no anchor before it; allowed: an alias of an &{anchor} above"
            )
        node = self._anchors[anchor]
        if node is None:
            raise UnreadableYamlError(
                line, f"the alias *{anchor} stands in its own anchor; allowed: an alias behind it"
            )
        return node

    def _items(self, depth: int) -> Iterator[_Node]:
        while not isinstance(event := next(self._events), yaml.SequenceEndEvent):
            yield self._node(event, depth + 1)

    def _mapping(self, depth: int) -> dict[str, tuple[int, _Node]]:
        own: dict[str, tuple[int, _Node]] = {}
        merged: dict[str, tuple[int, _Node]] = {}
        while not isinstance(event := next(self._events), yaml.MappingEndEvent):
            key = self._node(event, depth + 1)
            if not isinstance(key.value, str):
                raise UnreadableYamlError(key.line, "a key is no text; allowed: a text")
            value = self._node(next(self._events), depth + 1)
            if key.value == _MERGE and event.implicit[0]:
                self._merge(value, key.line, merged)
            elif key.value in own:
                before = own[key.value][0]
                raise UnreadableYamlError(
                    key.line, f"{key.value}: the key stands twice, also in line {before}; allowed: once"
                )
            else:
                own[key.value] = (key.line, value)
        return {**merged, **own}

    def _merge(self, value: _Node, line: int, into: dict[str, tuple[int, _Node]]) -> None:
        """Take the keys of other mappings, the earlier ones first (``<<: *defaults``)."""
        for node in value.value if isinstance(value.value, list) else [value]:
            if not isinstance(node.value, dict):
                raise UnreadableYamlError(
                    line, "<<: this is no mapping; allowed: an alias of a mapping, or a list of these"
                )
            self._merged += len(node.value)
            if self._merged > MOST_VALUES:
                raise _too_many(line)
            for key, entry in node.value.items():
                into.setdefault(key, entry)


def _line(event: Any) -> int:
    line: int = event.start_mark.line + 1
    return line


class _Expansion:
    """Makes plain values of nodes, and a copy for each alias."""

    def __init__(self) -> None:
        self.lines: dict[Path, int] = {}
        self._count = 0

    def plain(self, node: _Node, path: Path, depth: int) -> Tree:
        self._count += 1
        if self._count > MOST_VALUES:
            raise _too_many(node.line)
        if depth > MOST_DEPTH:
            raise UnreadableYamlError(
                node.line, f"values are nested too deeply by aliases; allowed: {MOST_DEPTH} levels"
            )
        if isinstance(node.value, list):
            for index, item in enumerate(node.value):
                self.lines[(*path, index)] = item.line
            return [self.plain(item, (*path, index), depth + 1) for index, item in enumerate(node.value)]
        if isinstance(node.value, dict):
            for key, (line, _) in node.value.items():
                self.lines[(*path, key)] = line
            return {key: self.plain(value, (*path, key), depth + 1) for key, (_, value) in node.value.items()}
        return node.value


def _too_many(line: int) -> UnreadableYamlError:
    return UnreadableYamlError(line, f"there are too many values, those of aliases included; allowed: {MOST_VALUES:,}")
