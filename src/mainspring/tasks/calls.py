"""A call of a task as the body of a message: ``{"task": NAME, "args": {…}}``."""

from __future__ import annotations

import inspect
import sys
import typing
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, NotRequired, Union

from mainspring.core.introspection import code_of
from mainspring.errors import ConfigError, InvalidParameterError, SerializationError, UnknownTaskError
from mainspring.mailbox.codec import Codec, NotJsonError, Unserialized, supported, type_name
from mainspring.worker.context import Context
from mainspring.worker.handler import Annotations, alternatives, awaited

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from mainspring.tasks.task import Task

HEAD = b'{"task":"'
ARGS = b'","args":'
_VARIABLE = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
_NO_DEFAULT = inspect.Parameter.empty


class Parameters:
    """The parameters of a task's function: which of them are sent, and their types.

    The :class:`~mainspring.worker.context.Context` (in a batch, the list of them) is not sent, nor are dependencies. Parameters
    that have a default need not be sent: then the worker's default holds. Of a function that takes calls in batches, the one
    parameter is a list, and its elements are sent.

    :raises ConfigError: the function takes ``*args`` or ``**kwargs``, or an annotation is missing or cannot be resolved; or
        a function for batches takes anything but one list.
    """

    def __init__(self, name: str, fn: Callable[..., Any], names: Mapping[str, Any], *, is_batch: bool = False) -> None:
        self._name = name
        try:
            signature = inspect.signature(fn)
        except ValueError as error:
            raise ConfigError(f"task {name}: its parameters cannot be read ({error}); wrap it in a function") from None
        annotations = Annotations(f"task {name}", code_of(fn), names)
        self.context: str | None = None
        """The name of the parameter that gets the context, or in a batch the contexts, or None."""
        self.dependencies = _dependencies(name, fn)
        """The names of the parameters that the worker provides; they are not sent."""
        self.result_type = awaited(annotations.known("return"))
        self._types: dict[str, Any] = {}
        sent = []
        for each in signature.parameters.values():
            if each.kind in _VARIABLE or each.kind is inspect.Parameter.POSITIONAL_ONLY:
                raise ConfigError(
                    f"task {name}{signature}: arguments are sent by name; write no `*`, `**` or `/` parameter"
                )
            if each.name in self.dependencies:
                continue
            if _is_context(annotations.known(each.name), is_batch=is_batch):
                if self.context is not None:
                    raise ConfigError(
                        f"task {name}{signature}: {self.context} and {each.name} are the context; keep one"
                    )
                self.context = each.name
                continue
            if each.annotation is _NO_DEFAULT:
                raise ConfigError(
                    f"task {name}{signature}: annotate {each.name} with its type (Any is whatever JSON can say)"
                )
            kind = supported(annotations.needed(each.name))
            self._types[each.name] = kind if each.default is _NO_DEFAULT else NotRequired[kind]
            sent.append(each.replace(annotation=kind))
        if is_batch:
            sent = [self._element(signature, sent)]
            self.result_type = _element_of(self.result_type)
        self._signature = inspect.Signature(sent)
        self._by_position = [each.name for each in sent if each.kind is not inspect.Parameter.KEYWORD_ONLY]
        self._required = {each.name for each in sent if each.default is _NO_DEFAULT}
        self._defaults = {each.name: each.default for each in sent if each.default is not _NO_DEFAULT}
        self._codecs_of_given: dict[frozenset[str], Codec] = {}

    def _element(self, signature: inspect.Signature, sent: list[inspect.Parameter]) -> inspect.Parameter:
        """Return the parameter of a function for batches as each call gives it: one element of the list."""
        element = typing.get_args(sent[0].annotation) if len(sent) == 1 else ()
        is_list = bool(element) and typing.get_origin(sent[0].annotation) is list
        if not is_list or sent[0].default is not _NO_DEFAULT:
            raise ConfigError(
                f"task {self._name}{signature}: with batch=, the function takes one list, as (jobs: list[Job]), and each call"
                " one element of it; a parameter of type list[Context] gets the context of each"
            )
        self._types = {sent[0].name: element[0]}
        return sent[0].replace(annotation=element[0])

    @cached_property
    def codec(self) -> Codec:
        """The codec of the arguments, made at first use.

        :raises ConfigError: JSON cannot hold the type of one of them.
        """
        import typing_extensions

        typed_dict: Any = typing_extensions.TypedDict  # pydantic takes the standard library's from Python 3.12 on
        kind = typed_dict(f"task {self._name}", self._types)
        kind.__pydantic_config__ = {"extra": "forbid"}
        return _Arguments(kind)

    def encode_given(self, arguments: dict[str, Any]) -> tuple[bytes, str | None]:
        """Return JSON bytes of the arguments of a call that may lack one, and the name of that one.

        :raises InvalidParameterError: more are missing, or one is unknown.
        :raises SerializationError: one is not of its type, or would not be read as what it is.
        """
        missing = self.missing(arguments)
        if missing is None:
            return self.encode(arguments), None
        given = frozenset(arguments)
        codec = self._codecs_of_given.get(given)
        if codec is None:
            import typing_extensions

            typed_dict: Any = typing_extensions.TypedDict
            kind = typed_dict(f"task {self._name}", {name: self._types[name] for name in arguments})
            self._codecs_of_given[given] = codec = _Arguments(kind)
        return codec.encode(arguments), missing

    def missing(self, arguments: dict[str, Any]) -> str | None:
        """Return the name of the parameter that has neither an argument nor a default, or None if each has one.

        :raises InvalidParameterError: several are missing, or an argument is unknown.
        """
        missing = [name for name in self._by_position if name in self._required and name not in arguments]
        others = self._required - arguments.keys() - set(missing)
        if len(missing) + len(others) != 1:
            self._check_signature((), arguments)
            return None
        (lacked,) = missing or others
        self._check_signature((), {**arguments, lacked: None})
        return lacked

    def with_defaults(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments of a call, and the defaults of missing arguments.

        :raises InvalidParameterError: one is missing or unknown.
        """
        bound = self._check_signature((), arguments)
        bound.apply_defaults()
        return bound.arguments

    def argument(self, name: str, arguments: dict[str, Any]) -> Any:
        """Return the argument of that name, or its default.

        :raises InvalidParameterError: it is missing and has none.
        """
        if name not in arguments and name not in self._defaults:
            self._check_signature((), arguments)
        return arguments[name] if name in arguments else self._defaults[name]

    def check_types(self) -> None:
        """Raise :class:`ConfigError` if JSON cannot hold the type of a parameter."""
        _ = self.codec

    @property
    def names(self) -> list[str]:
        """The names of the parameters that are sent."""
        return list(self._types)

    def without_defaults(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments without any that equal the function's defaults."""
        defaults = self._defaults
        return {name: value for name, value in arguments.items() if name not in defaults or value != defaults[name]}

    def bind(self, args: tuple[Any, ...], keywords: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments of a call by their names, as they were given.

        :raises InvalidParameterError: there are too many, or one is given twice. What is missing or unknown is for
            :meth:`check`, as their types are: the codec refuses it.
        """
        if not args:
            return keywords
        bound = dict(zip(self._by_position, args))  # noqa: B905 - the keyword takes as long as the rest
        if keywords or len(bound) != len(args):
            bound |= keywords
            if len(bound) != len(args) + len(keywords):
                self._check_signature(args, keywords)
        return bound

    def encode(self, arguments: dict[str, Any]) -> bytes:
        """Return JSON bytes of the arguments.

        :raises InvalidParameterError: one is missing or unknown.
        :raises SerializationError: one is not of its type, or would not be read as what it is.
        """
        try:
            return self.codec.encode(arguments)
        except SerializationError:
            self.check_names(arguments)
            raise

    def check(self, arguments: dict[str, Any]) -> None:
        """Raise what :meth:`encode` raises for what does not fit."""
        try:
            self.codec.check(arguments)
        except SerializationError:
            self.check_names(arguments)
            raise

    def check_names(self, arguments: dict[str, Any]) -> None:
        """Raise :class:`InvalidParameterError` if an argument is missing or unknown."""
        self._check_signature((), arguments)

    def _check_signature(self, args: tuple[Any, ...], keywords: dict[str, Any]) -> inspect.BoundArguments:
        try:
            return self._signature.bind(*args, **keywords)
        except TypeError as error:
            raise InvalidParameterError(f"task {self._name}{self._signature}: {error}") from None


def _is_context(kind: Any, *, is_batch: bool) -> bool:
    """True if a parameter of that type gets the context; in a batch, those of all calls, as a list."""
    if not is_batch:
        return Context in alternatives(kind)
    return typing.get_origin(kind) is list and Context in alternatives(typing.get_args(kind)[0])


def _element_of(returned: Any) -> Any:
    """Return the type of the result of one call, by what a function for batches returns; None where that is not said."""
    for kind in alternatives(returned):
        if typing.get_origin(kind) in (list, Sequence):
            results = [one for one in alternatives(typing.get_args(kind)[0]) if not _is_error(one)]
            return Union[tuple(results)] if results else None  # noqa: UP007 - of a list
    return None


def _is_error(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseException)


def _dependencies(name: str, fn: Callable[..., Any]) -> frozenset[str]:
    if "uncalled_for" not in sys.modules:  # who declares a dependency has imported it
        return frozenset()
    from mainspring.tasks.dependencies import names_of

    try:
        return names_of(fn)
    except TypeError as error:
        raise ConfigError(f"task {name}: {error}") from None
    except AttributeError:  # the library sees none where a function is wrapped, and fails as it says so
        raise ConfigError(f"task {name}: only a function can have dependencies, not {fn!r:.200}") from None


class _Arguments(Codec):
    """The arguments of a task by name."""

    def _of(self, body: Any) -> str:
        return "a call"


class TaskCall:
    """One call of a task: its arguments by name, of the types that the function is annotated with."""

    __slots__ = ("arguments", "task")

    def __init__(self, task: Task[..., Any], arguments: dict[str, Any]) -> None:
        self.task = task
        self.arguments = arguments

    def __repr__(self) -> str:
        return f"{self.task.name}({', '.join(f'{name}={value!r}' for name, value in self.arguments.items())})"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TaskCall):
            return NotImplemented
        return self.task is other.task and self.arguments == other.arguments

    __hash__ = None  # type: ignore[assignment]


class OutgoingCall:
    """A call that is about to be sent, as :meth:`Middleware.sending` gets it."""

    __slots__ = ("arguments", "headers", "task")

    def __init__(self, task: Task[..., Any], arguments: dict[str, Any], headers: Mapping[str, str] | None) -> None:
        self.task = task
        """The task that is called."""
        self.arguments = arguments
        """The arguments by name; they are checked when the block is entered."""
        self.headers = dict(headers or {})
        """The headers of its message."""


class CallCodec(Codec):
    """Calls of the tasks in a register, to JSON bytes and back."""

    def __init__(self, register: Mapping[str, Task[..., Any]]) -> None:
        super().__init__()
        self.body_type = TaskCall
        self._register = register
        self._by_beginning: dict[bytes, tuple[Task[..., Any], Callable[[bytes], Any]]] = {}
        """The task of the calls that begin so, and what decodes their arguments."""

    def encode(self, call: TaskCall) -> bytes:
        """Return JSON bytes of ``call``.

        :raises InvalidParameterError: an argument is missing or unknown.
        :raises SerializationError: one is not of its type, or would not be read as what it is. Or it is no call.
        """
        _check_call(call)
        return call.task.encode(call.arguments)

    def unserialized(self, call: TaskCall) -> Unserialized:
        """Return ``call`` itself, for a store that keeps objects, after a check of its arguments."""
        self.check(call)
        return Unserialized(call, TaskCall)

    def check(self, call: TaskCall) -> None:
        """Raise what :meth:`encode` raises for arguments that do not fit."""
        _check_call(call)
        call.task.parameters.check(call.arguments)

    def decode(self, raw: bytes | Unserialized) -> TaskCall:
        """Return the call that ``raw`` holds.

        :raises NotJsonError: it is no JSON.
        :raises UnknownTaskError: no task of that name is registered here.
        :raises SerializationError: it is no call, or its arguments do not fit the function.
        """
        if isinstance(raw, Unserialized):
            return self._own(raw.body)
        before, _, rest = raw.partition(ARGS)
        known = self._by_beginning.get(before) or self._begun_by(before)
        if known is not None and rest[-1:] == b"}":  # as `encode` writes it
            task, decode = known
            try:
                return TaskCall(task, decode(rest[:-1]))
            except NotJsonError:
                pass  # another program may have written more behind the arguments
        name, arguments = _parts(raw)
        task = self.task_named(name)
        return TaskCall(task, task.parameters.codec.decode(arguments))

    def _begun_by(self, before: bytes) -> tuple[Task[..., Any], Callable[[bytes], Any]] | None:
        """Return what is known of the calls that begin so, or None if they call no registered task."""
        task = self._register.get(before[len(HEAD) :].decode(errors="replace")) if before.startswith(HEAD) else None
        if task is None:
            return None
        known = self._by_beginning[before] = task, task.parameters.codec.decode
        return known

    def task_of(self, raw: bytes | Unserialized) -> str | None:
        """Return the name of the task that is called, or None if ``raw`` is no call."""
        if isinstance(raw, Unserialized):
            return raw.body.task.name if isinstance(raw.body, TaskCall) else None
        known = self._begun_by(raw.partition(ARGS)[0])
        try:
            return _parts(raw)[0] if known is None else known[0].name
        except SerializationError:
            return None

    def arguments_of(self, raw: bytes | Unserialized) -> dict[str, Any] | None:
        """Return the arguments of a call by name, as JSON values, or None if ``raw`` is no call."""
        if isinstance(raw, Unserialized):
            return dict(raw.body.arguments) if isinstance(raw.body, TaskCall) else None
        try:
            arguments = _read(raw)["args"]
        except SerializationError:
            return None
        return arguments if isinstance(arguments, dict) else None

    def _own(self, body: Any) -> TaskCall:
        """Return a call that was not serialized, as one of the task that is registered here under its name."""
        if not isinstance(body, TaskCall):
            raise SerializationError(f"the stored body is no call of a task, but a {type_name(type(body))}")
        task = self.task_named(body.task.name)
        if body.task.parameters is not task.parameters:  # of another Tasks on the same queue
            task.parameters.codec.check(body.arguments)
        return TaskCall(task, body.arguments)

    def task_named(self, name: str) -> Task[..., Any]:
        """Return the task that is registered under the name.

        :raises UnknownTaskError: there is none.
        """
        task = self._register.get(name)
        if task is None:
            raise UnknownTaskError(
                f"no task {name!r:.200} is registered in this worker; import the module that defines it, or keep the old name:"
                f" @tasks.task(name={name!r:.200})"
            )
        return task


def head(name: str) -> bytes:
    """Return how the JSON of each call of a task begins."""
    return HEAD + name.encode() + ARGS


def is_call_of(task: Task[..., Any], raw: bytes | Unserialized) -> bool:
    """True if a call names the task so, and not by an alias. False if another program has written it in a way of its own."""
    if isinstance(raw, Unserialized):
        return isinstance(raw.body, TaskCall) and raw.body.task.name == task.name
    return raw.startswith(task.head)


def with_arguments(raw: bytes, arguments: Mapping[str, Any]) -> bytes:
    """Return the JSON of a call with these arguments (JSON values) in place of its own of the same names. They are not checked.

    :raises SerializationError: ``raw`` is no call, or an argument is no JSON.
    """
    name, before = _parts(raw)
    codec = Codec()
    return head(name) + codec.encode({**codec.decode(before), **arguments}) + b"}"


def _parts(raw: bytes) -> tuple[str, bytes]:
    """Return the task's name and the JSON of the arguments of a call that another program has written."""
    from pydantic_core import to_json

    found = _read(raw)
    return found["task"], to_json(found["args"], inf_nan_mode="constants")


def _read(raw: bytes) -> dict[str, Any]:
    """Return the JSON values of a call."""
    from pydantic_core import from_json

    try:
        found = from_json(raw)
    except ValueError as error:
        raise NotJsonError(f"the stored body is no JSON: {error}") from None
    if isinstance(found, dict) and found.keys() == {"task", "args"} and isinstance(found["task"], str):
        return found
    raise SerializationError('the stored body is no call of a task: {"task": NAME, "args": {…}} is')


def _check_call(body: Any) -> None:
    if not isinstance(body, TaskCall):
        raise SerializationError(
            f"a mailbox of tasks takes calls, not a {type_name(type(body))}: send by task.send(…), change by job.edit(…)"
        )
