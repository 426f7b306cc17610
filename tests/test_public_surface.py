"""The public surface is what ``public_surface.txt`` says: names, signatures, and the members of classes.

``python tests/test_public_surface.py`` writes that file anew. Public are the names in ``__all__`` of the modules below, the
classes of ``mainspring.errors`` and ``mainspring.events``, the mailboxes that ``open_mailbox`` makes, and all that the
reference shows. A member counts wherever it is defined, so that it may move from a class to its base unnoticed.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import inspect
import re
from enum import Enum
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import mainspring

if TYPE_CHECKING:
    from collections.abc import Iterator

HERE = Path(__file__)
SNAPSHOT = HERE.with_name("public_surface.txt")
REFERENCE = HERE.parents[1] / "docs" / "reference"
REWRITE = f"python tests/{HERE.name}"
BY_ALL = ("mainspring", "mainspring.session", "mainspring.testing", "mainspring.testing.mailbox_contract")
BY_CLASS = ("mainspring.errors", "mainspring.events")
PASSED_ON = "mainspring.core.dispatcher"  # whose names `mainspring.events` has, too
URLS = ("memory://jobs", "sqlite:///jobs.db", "redis://localhost", "postgresql://localhost/jobs", "nats://localhost")
PROTOCOLS = {
    "__aenter__": "async with", "__aiter__": "async for", "__await__": "await", "__bool__": "bool()", "__call__": "call",
    "__contains__": "in", "__enter__": "with", "__getitem__": "[]", "__iter__": "for", "__len__": "len()",
}  # fmt: skip


class Verbatim(str):
    """Text that a signature shows without quotes."""

    __slots__ = ()
    __repr__ = str.__str__


def shown(value: object) -> str:
    """A value as text that is the same in each run, on each version of Python, and wherever its class is defined."""
    if isinstance(value, type) or inspect.isroutine(value):
        return getattr(value, "__qualname__", repr(value))
    if isinstance(value, Enum):
        return f"{type(value).__name__}.{value.name}"
    if isinstance(value, tuple | frozenset):
        parts = ", ".join(map(shown, value) if isinstance(value, tuple) else sorted(map(shown, value)))
        return f"({parts})" if isinstance(value, tuple) else f"frozenset({parts})"
    return re.sub(r" at 0x[0-9a-f]+|\bmainspring\.(?:\w+\.)+", "", repr(value))


def annotation_of(value: object) -> str:
    return value if isinstance(value, str) else "None" if value is None else shown(value)


def signature(of: Any, *, skip: int = 0, returns: bool = True) -> str:
    """The signature of a callable as text, without its first ``skip`` parameters and those that are private."""
    found, empty = inspect.signature(of), inspect.Parameter.empty

    def verbatim(value: object, text: Any) -> Any:
        return value if value is empty else Verbatim(text(value))

    parameters = [
        one.replace(annotation=verbatim(one.annotation, annotation_of), default=verbatim(one.default, shown))
        for one in list(found.parameters.values())[skip:]
        if not one.name.startswith("_")
    ]
    answer = verbatim(found.return_annotation, annotation_of) if returns else empty
    return str(inspect.Signature(parameters, return_annotation=answer))


def function(name: str, value: Any, skip: int = 0) -> str:
    kind = "async def" if inspect.iscoroutinefunction(inspect.unwrap(value)) else "def"
    return f"{kind} {name}{signature(value, skip=skip)}"


def member(name: str, value: Any) -> str:
    """A member of a class, from what the ``__dict__`` of the class holds."""
    if isinstance(value, property | cached_property):
        get = value.fget if isinstance(value, property) else value.func
        settable = " (settable)" if getattr(value, "fset", None) else ""
        return f"{name}: {annotation_of(inspect.signature(get).return_annotation)}{settable}"
    if isinstance(value, classmethod):
        return f"class {function(name, value.__func__, 1)}"
    if isinstance(value, staticmethod):
        return f"static {function(name, value.__func__)}"
    return function(name, value, 1) if inspect.isfunction(value) else f"{name} = {shown(value)}"


def is_ours(kind: type) -> bool:
    return kind.__module__.partition(".")[0] == "mainspring"


def attributes(kind: type) -> list[str]:
    """The public attributes that the constructor sets."""
    if dataclasses.is_dataclass(kind) or "__init__" not in vars(kind):
        return []
    source = inspect.getsource(inspect.unwrap(vars(kind)["__init__"]))
    return re.findall(r"^ +self\.([a-z]\w*)(?:: .*)? = ", source, re.MULTILINE)


def members(of: type) -> dict[str, str]:
    """A line for each public member of a class, by its name, whichever of our classes defines it.

    The fields of a dataclass are the parameters of its constructor, and have no lines of their own.
    """
    found: dict[str, str] = {}
    fields = {field.name: field.init for field in dataclasses.fields(of)} if dataclasses.is_dataclass(of) else {}
    ours = [kind for kind in of.__mro__ if is_ours(kind)]
    for kind in ours:
        for name, annotation in vars(kind).get("__annotations__", {}).items():
            found.setdefault(name, f"{name}: {annotation_of(annotation)}")
        for name, value in vars(kind).items():
            if name in found or value is None or inspect.ismemberdescriptor(value):
                continue
            if isinstance(value, Enum):
                found[name] = f"{name} = {value.value!r}"
            elif name in PROTOCOLS:
                found[name] = f"supports {PROTOCOLS[name]}"
            elif not name.startswith("_"):
                found[name] = member(name, value)
    for name in (name for kind in ours for name in attributes(kind)):
        found.setdefault(name, f"self.{name}")
    return {
        name: line
        for name, line in found.items()
        if name in PROTOCOLS or not (name.startswith("_") or fields.get(name))
    }


def constructor(of: type) -> str:
    """The signature of a class that has a constructor of our making; "" for others."""
    has_one = any(is_ours(kind) and "__init__" in vars(kind) for kind in of.__mro__)
    return signature(of, returns=False) if has_one and not getattr(of, "_is_protocol", False) else ""


def class_lines(name: str, of: type, known: dict[type, str]) -> Iterator[str]:
    """A class with its public bases, and what it has that no base has alike."""
    bases = [base for base in of.__mro__[1:] if base in known or (base.__module__ == "builtins" and base is not object)]
    direct = [base for base in bases if not any(base in other.__mro__[1:] for other in bases)]
    kind = "dataclass" if dataclasses.is_dataclass(of) else "class"
    yield f"{kind} {name}({', '.join(known.get(base, base.__name__) for base in direct)})"
    inherited = {line for base in direct if base in known for line in (constructor(base), *members(base).values())}
    for line in (constructor(of), *(line for _, line in sorted(members(of).items()))):
        if line and line not in inherited:
            yield f"    {line}"


def public() -> dict[str, dict[str, Any]]:
    """The public names, under what they are imported from."""
    found: dict[str, dict[str, Any]] = {}
    for path in BY_ALL:
        module = importlib.import_module(path)
        names = getattr(module, "__all__", None) or [
            name
            for name, one in vars(module).items()
            if name.isidentifier() and not name.startswith("_") and not isinstance(one, ModuleType)
        ]
        found[path] = {name: getattr(module, name) for name in names}
    for path in BY_CLASS:
        everything = vars(importlib.import_module(path)).items()
        found[path] = {
            name: one for name, one in everything if isinstance(one, type) and one.__module__ in (path, PASSED_ON)
        }
    found["open_mailbox"] = {url.partition("//")[0]: type(mainspring.open_mailbox(url)) for url in URLS}
    for page in sorted(REFERENCE.glob("*.md")):
        for path in re.findall(r"^::: mainspring\.(\S+)\.(\w+)$", page.read_text(encoding="utf-8"), re.MULTILINE):
            module = importlib.import_module(f"mainspring.{path[0]}")
            found.setdefault(module.__name__, {})[path[1]] = getattr(module, path[1])
    return found


def lines() -> Iterator[str]:
    """The public surface, line by line."""
    surface = public()
    known: dict[type, str] = {}
    for names in surface.values():
        known |= {one: one.__name__ for one in names.values() if isinstance(one, type) and one not in known}
    told: dict[int, str] = {}
    for path, names in sorted(surface.items()):
        yield f"# {path}"
        for name, one in sorted(names.items()):
            if id(one) in told:
                yield f"{name} = {told[id(one)]}"
                continue
            told[id(one)] = f"{path}.{name}"
            if isinstance(one, type):
                yield from class_lines(name, one, known)
            elif inspect.isfunction(one):
                yield function(name, one)
            else:
                yield f"{name}: {type(one).__name__}"
        yield ""


def test_the_public_surface_is_as_written_down() -> None:
    before, now = SNAPSHOT.read_text(encoding="utf-8").splitlines(), list(lines())
    changes = "\n".join(difflib.unified_diff(before, now, "written down", "now", lineterm="", n=1))
    assert not changes, f"the public surface has changed; if that is meant, `{REWRITE}` writes it down:\n{changes}"


if __name__ == "__main__":
    SNAPSHOT.write_text("".join(f"{line}\n" for line in lines()), encoding="utf-8")
