"""Find the LoopGroup, or the function that makes one, that ``MODULE:ATTR`` names.

Where there is none, a :class:`UserError` says what to write instead.
"""

from __future__ import annotations

import inspect
import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mainspring.cli.early_signals import Interrupted
from mainspring.cli.user_errors import UserError, explain, user_line

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

    from mainspring.group.group import LoopGroup


def load_group(target: str) -> LoopGroup:
    """Import the module (the working directory comes first on the path) and return the group, made by a call if need be."""
    found = load_attribute(target)
    from mainspring.group.group import LoopGroup
    from mainspring.tasks.tasks import Tasks
    from mainspring.worker.runnable import Runnable

    if callable(found) and not isinstance(found, LoopGroup):
        found = _call(found, target)
    if not isinstance(found, LoopGroup):
        attribute = target.partition(":")[2]
        if isinstance(found, Runnable):
            remedy = f"wrap it: group = LoopGroup([{attribute}])"
        elif isinstance(found, Tasks):
            remedy = f"wrap its loop: group = LoopGroup([{attribute}.loop()])"
        else:
            remedy = "name a LoopGroup or a function that returns one"
        raise UserError(f"{target} is {_kind(found)}, not a LoopGroup; {remedy}")
    return found


def load_builder(target: str) -> Callable[..., Any]:
    """Import the module and return the function ``build(mailbox)`` that makes a group for a simulation."""
    found = load_attribute(target)
    from mainspring.group.group import LoopGroup

    if isinstance(found, LoopGroup) or not callable(found) or inspect.iscoroutinefunction(found):
        raise UserError(
            f"{target} is {_kind(found)}; a simulation runs many groups, so name a plain function that makes one on the"
            " mailbox it is given: def build(mailbox): return LoopGroup([MainLoop(mailbox, handle)])"
        )
    if (reason := _why_not_callable(found, None)) is not None:
        raise UserError(f"{target} is called with one mailbox ({reason}); it must be build(mailbox)")
    build: Callable[..., Any] = found
    return build


def load_attribute(target: str, *kinds: type) -> Any:
    """Import the module and return what it has under that name, of any type.

    ``kinds``: what the command takes, a LoopGroup if nothing is said. The error names what the module has of it.
    """
    name, attribute = _split(target)
    return _attribute(_import(name), attribute, target, kinds)


def instead(target: str, *kinds: type) -> str:
    """Return what the module of a loaded target has of these kinds, as the end of an error text."""
    found = _named(sys.modules[target.partition(":")[0]], kinds)
    return f"; it has {', '.join(found)}" if found else ""


def _why_not_callable(fn: Any, *arguments: Any) -> str | None:
    """Return why ``fn`` cannot be called with these arguments, or None. A function without a signature may take any."""
    try:
        inspect.signature(fn).bind(*arguments)
    except TypeError as error:
        return str(error)
    except ValueError:
        pass
    return None


def _split(target: str) -> tuple[str, str]:
    name, colon, attribute = target.partition(":")
    if not (colon and name and attribute):
        raise UserError(
            f"{target!r} is no target; write MODULE:ATTR, for example app:group for `group = LoopGroup(…)` in app.py"
        )
    if "/" in name or name.endswith(".py"):
        dotted = name.removesuffix(".py").strip("./").replace("/", ".")
        if "@" in target:  # a URL without its colon, and maybe with a password
            raise UserError(f"{target!r} is neither MODULE:ATTR nor a URL; write a URL as sqlite:///jobs.db?name=jobs")
        raise UserError(f"{target!r} names a file; write the module's name instead: {dotted}:{attribute}")
    return name, attribute


def _import(name: str) -> ModuleType:
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        if (
            error.name is not None
            and (error.name == name or name.startswith(f"{error.name}."))
            and not user_line(error)
        ):
            raise UserError(
                f"there is no module {error.name!r} in {here} or among the installed packages; start mainspring in the"
                " directory that holds it, or set PYTHONPATH"
            ) from error
        raise UserError(f"{name} does not import: {explain(error)}; install it, or mend the import") from error
    except SystemExit as error:
        at = user_line(error)
        raise UserError(
            f"{name} does not import: {at}: it calls sys.exit({error.code!r}); keep that under"
            ' `if __name__ == "__main__":`'
        ) from error
    except (KeyboardInterrupt, Interrupted):
        raise
    except BaseException as error:  # whatever it is, it is the module's
        raise UserError(f"{name} does not import: {explain(error)}") from error
    finally:
        _expect_no_shutdown()


def _expect_no_shutdown() -> None:
    """Let a command that only looks at the group not warn of what its module has registered: its run would call that."""
    from mainspring.runtime.signals import ShutdownCoordinator

    if (coordinator := ShutdownCoordinator.get()) is not None:
        coordinator.expect_no_block()


def _attribute(module: ModuleType, attribute: str, target: str, kinds: tuple[type, ...]) -> Any:
    found: Any = module
    for part in attribute.split("."):
        try:
            found = getattr(found, part)
        except AttributeError:
            raise UserError(f"{target}: {module.__name__} has no {part!r}; {_candidates(module, kinds)}") from None
        except Exception as error:  # a module or an object can compute its attributes
            raise UserError(f"{target}: {module.__name__} does not give {part!r}: {explain(error)}") from error
    return found


def _candidates(module: ModuleType, kinds: tuple[type, ...]) -> str:
    from mainspring.group.group import LoopGroup

    if found := _named(module, kinds or (LoopGroup,)):
        return f"it has {', '.join(found)}"
    if kinds:
        return f"define a {' or a '.join(kind.__name__ for kind in kinds)} there"
    return "define one there: group = LoopGroup([…])"


def _named(module: ModuleType, kinds: tuple[type, ...]) -> list[str]:
    return [f"{module.__name__}:{name}" for name, value in vars(module).items() if isinstance(value, kinds)]


def _call(factory: Any, target: str) -> Any:
    if inspect.iscoroutinefunction(factory):
        raise UserError(
            f"{target} is an async function; a plain one must return the LoopGroup, before any event loop runs"
        )
    if (reason := _why_not_callable(factory)) is not None:
        raise UserError(
            f"{target} cannot be called without arguments ({reason}); give a LoopGroup or a function that needs none"
        )
    try:
        return factory()
    except SystemExit as error:
        raise UserError(f"{target}() calls sys.exit({error.code!r}); it must return a LoopGroup") from error
    except (KeyboardInterrupt, Interrupted):
        raise
    except BaseException as error:
        raise UserError(f"{target}() failed: {explain(error)}") from error


def _kind(value: Any) -> str:
    if inspect.iscoroutinefunction(value):
        return "an async function"
    return "None" if value is None else f"an object of type {type(value).__name__}"
