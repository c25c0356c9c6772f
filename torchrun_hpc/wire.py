"""Lines of JSON between processes, and the checks of received data.

The type hints of a dataclass or typed dictionary define how it is written and read:

- ``bool``, ``int``, finite ``float`` and printable ``str``, each of exactly that type
- an enumeration as its values, which are texts
- tuples, sequences and mappings of types in this list; a mapping with other keys than
  texts is a list of pairs
- ``Any``, which is written and read as text
- ``| None``: a missing field is ``None``; without this hint it is an error
- a union of classes, as an object whose only key is the name of the value's class:
  ``{"heartbeat": {"seconds": 3.5}}``
- `AnyText`, `Plain`, `Places`, and ``Annotated`` with a `short_text`, or with a
  function that returns the value or raises ``ValueError``

Received fields without a hint are ignored. If a dataclass has a method ``check``, it
can raise ``ValueError``.
"""

from __future__ import annotations

import functools
import io
import json
import math
import re
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import is_dataclass
from enum import EnumMeta
from typing import Annotated, Any, NamedTuple, TypeVar

_T = TypeVar("_T")

_DIGITS = 20  # of a 64-bit integer with its sign
_MOST_PLACES = 2**17  # nodes
_FAULTS = (ArithmeticError, LookupError, RecursionError, TypeError, ValueError)


class WireError(ValueError):
    """Received data is invalid."""


def printable(text: str, longest: int) -> str:
    """Return the first ``longest`` characters, with spaces for unprintable ones."""
    return "".join(c if c.isprintable() else " " for c in text[:longest])


# --- lines ------------------------------------------------------------------------


def to_line(message: Any) -> bytes:
    """Return plain data as a line of JSON."""
    return _ENCODER.encode(message).encode() + b"\n"


def from_json(text: bytes | bytearray | str) -> Any:
    """Read JSON; refuse deep nesting and long integers with `WireError`."""
    try:
        return _DECODER.decode(text if isinstance(text, str) else text.decode())
    except (ValueError, RecursionError):  # UnicodeDecodeError is a ValueError
        raise WireError("not JSON") from None


def _integer(text: str) -> int:
    """Read an integer of limited size.

    Python reads up to 4,300 digits, but cannot write a longer sum.
    """
    if len(text) > _DIGITS:
        raise ValueError
    return int(text)


# With options, the functions of `json` make a new encoder or decoder for each message.
_ENCODER = json.JSONEncoder(separators=(",", ":"))
_DECODER = json.JSONDecoder(parse_int=_integer)


class Lines:
    """The received part of a connection, as lines of at most ``limit`` bytes."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._rest = bytearray()

    def feed(self, data: bytes) -> Iterator[dict[str, Any]]:
        """Yield the complete messages, as JSON objects.

        Lines are read lazily, so that lines after a wrong one cost nothing.

        Raises:
            WireError: A line is too long, or not a JSON object.
        """
        for part in io.BytesIO(data):  # a line, or the end of the data
            self._rest += part
            is_complete = part.endswith(b"\n")
            if len(self._rest) - is_complete > self.limit:
                raise WireError(f"a line of more than {self.limit} bytes")
            if is_complete:
                message, self._rest = from_json(self._rest), bytearray()
                if type(message) is not dict:
                    raise WireError("not an object")
                yield message


# --- values -----------------------------------------------------------------------


def encode(value: Any, kind: Any = None) -> Any:
    """Return a dataclass, or a member of the union ``kind``, as plain data."""
    return _write(_form(kind or type(value)), value)


def decode(kind: type[_T], data: object) -> _T:
    """Read plain data; raise `WireError` if the data do not fit the type."""
    form = _form(kind)
    try:
        value: _T = form.read(data)
    except _FAULTS:
        raise WireError(f"not a {_words(kind)}") from None
    return value


def _words(kind: Any) -> str:
    name = kind.__name__ if isinstance(kind, type) else "message"
    return re.sub("(?<=[a-z])(?=[A-Z])", " ", name).lower()


class _Form(NamedTuple):
    """The reader and writer of a type's values; ``read`` raises one of `_FAULTS`."""

    read: Callable[[Any], Any]
    write: Callable[[Any], Any] | None = None


def _make_form(kind: Any) -> _Form:
    origin = typing.get_origin(kind) or kind
    if form := _PLAIN.get(origin):
        return form
    make = _MADE_OF.get(origin) or (_choice if isinstance(kind, EnumMeta) else _fields)
    return make(kind, *typing.get_args(kind))


_form: Callable[[Any], _Form] = functools.cache(_make_form)


def _write(form: _Form, value: Any) -> Any:
    return form.write(value) if form.write else value


# --- scalars ----------------------------------------------------------------------


def _exactly(*kinds: type) -> Callable[[Any], Any]:
    """Return a reader of exactly these types: ``True`` is not a number here."""

    def read(value: Any) -> Any:
        if type(value) not in kinds:
            raise TypeError
        return value

    return read


_any_text, _object, _list = _exactly(str), _exactly(dict), _exactly(list, tuple)
_any_number, _any_int = _exactly(int, float), _exactly(int)


def _text(value: Any) -> Any:
    if not _any_text(value).isprintable():
        raise ValueError
    return value


def short_text(most: int) -> _Form:
    """Return the form of a text with a maximum length, for ``Annotated``.

    Writing cuts the text, and replaces unprintable characters. Reading refuses both.
    """

    def read(value: Any) -> Any:
        if len(_text(value)) > most:
            raise ValueError
        return value

    return _Form(read, lambda value: printable(value, most))


def _number(value: Any) -> float:
    if not math.isfinite(_any_number(value)):
        raise ValueError
    return float(value)


def _choice(kind: Any) -> _Form:
    members = {member.value: member for member in kind}
    return _Form(lambda value: members[_text(value)], lambda member: member.value)


# --- composed types ---------------------------------------------------------------


def _fields(kind: Any) -> _Form:
    hints = typing.get_type_hints(kind, include_extras=True)
    forms = [(name, _form(hint)) for name, hint in hints.items()]
    check = getattr(kind, "check", lambda _: None)

    def read(data: Any) -> Any:
        parts = _object(data)
        value = kind(**{name: form.read(parts.get(name)) for name, form in forms})
        check(value)
        return value

    def write(value: Any) -> Any:
        return {name: _write(form, getattr(value, name)) for name, form in forms}

    return _Form(read, write if is_dataclass(kind) else None)


def _annotated(_: Any, kind: Any, how: Any) -> _Form:
    if isinstance(how, _Form):
        return how
    read, write = _form(kind)
    return _Form(lambda data: how(read(data)), write)


def _union(_: Any, *kinds: Any) -> _Form:
    if types.NoneType in kinds:
        (kind,) = (each for each in kinds if each is not types.NoneType)
        return _optional(kind)
    tags = {kind: _words(kind).replace(" ", "_") for kind in kinds}
    by_tag = {tag: kind for kind, tag in tags.items()}
    if len(by_tag) < len(kinds):
        raise TypeError("two classes with the same name")

    # A process needs few of the forms, so each is made when its first value comes.
    def read(data: Any) -> Any:
        ((tag, value),) = _object(data).items()
        return _form(by_tag[tag]).read(value)

    def write(value: Any) -> Any:
        kind = type(value)
        return {tags[kind]: _write(_form(kind), value)}

    return _Form(read, write)


def _optional(kind: Any) -> _Form:
    read, write = _form(kind)
    return _Form(
        lambda data: None if data is None else read(data),
        write and (lambda value: None if value is None else write(value)),
    )


def _tuple(kind: Any, *parts: Any) -> _Form:
    if ... in parts:
        return _sequence(kind, parts[0])
    forms = [_form(part) for part in parts]

    def read(data: Any) -> Any:
        pairs = zip(forms, _list(data), strict=True)
        return tuple(form.read(part) for form, part in pairs)

    def write(value: Any) -> Any:
        return [_write(form, part) for form, part in zip(forms, value, strict=True)]

    return _Form(read, write if any(form.write for form in forms) else None)


def _sequence(kind: Any, part: Any) -> _Form:
    made = list if typing.get_origin(kind) is list else tuple
    read, write = _form(part)
    return _Form(
        lambda data: made(map(read, _list(data))),
        write and (lambda value: [write(part) for part in value]),
    )


def _mapping(_: Any, key: Any, part: Any) -> _Form:
    name, form = _form(key), _form(part)

    def read(data: Any) -> Any:
        pairs = _object(data).items() if key is str else _list(data)
        return {name.read(each): form.read(value) for each, value in pairs}

    def write(value: Mapping[Any, Any]) -> Any:
        pairs: Any = value.items()
        if form.write:
            pairs = [(each, form.write(value)) for each, value in pairs]
        return dict(pairs) if key is str else list(pairs)

    return _Form(read, write)


# A text that may have unprintable characters.
AnyText = Annotated[str, _Form(_any_text)]
# JSON that is neither checked nor changed.
Plain = Annotated[Any, _Form(lambda data: data)]


def _from_places(data: Any) -> tuple[int, ...]:
    size, others = _list(data)
    if not 0 <= _any_int(size) <= _MOST_PLACES:
        raise ValueError
    numbers = [*range(size)]
    for place, number in others:
        if _any_int(place) < 0:
            raise ValueError
        numbers[place] = _any_int(number)
    return tuple(numbers)


def _to_places(numbers: Any) -> Any:
    return [len(numbers), [pair for pair in enumerate(numbers) if pair[0] != pair[1]]]


# Numbers of which most equal their own index, in few bytes: their count, and the other
# numbers with their indexes.
Places = Annotated[tuple[int, ...], _Form(_from_places, _to_places)]

_PLAIN = {
    bool: _Form(_exactly(bool)),
    int: _Form(_exactly(int)),
    float: _Form(_number),
    str: _Form(_text),
    Any: _Form(_text, str),
}
_MADE_OF: dict[Any, Callable[..., _Form]] = {
    **dict.fromkeys((types.UnionType, typing.Union), _union),
    **dict.fromkeys((list, Sequence), _sequence),
    **dict.fromkeys((dict, Mapping), _mapping),
    tuple: _tuple,
    Annotated: _annotated,
}
