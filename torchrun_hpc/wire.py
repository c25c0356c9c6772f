"""Lines of JSON between processes, and the checks of what has arrived.

The type hints of a dataclass, or of a typed dictionary, say how it is written and read:

- ``bool``, ``int``, finite ``float`` and printable ``str``, each of exactly that type;
  an enumeration by the texts that are its values
- tuples, sequences, and mappings of what is in this list; a mapping whose keys are no
  texts is a list of pairs
- ``Any``, which is written as text, and stays one
- ``| None``: a field that is missing counts as ``None``, and as wrong without this
- `AnyText`, and ``Annotated`` with a `short_text`, or with a function that returns the
  value or raises ``ValueError``

Fields that the hints do not name are left out. A dataclass may have a method ``check``,
which raises ``ValueError``.
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

_DIGITS = 20  # of 64 bits, with the sign
_FAULTS = (ArithmeticError, LookupError, RecursionError, TypeError, ValueError)


class WireError(ValueError):
    """Received data is not valid."""


def printable(text: str, longest: int) -> str:
    """Return what others have written, without what a terminal would act on.

    Args:
        text: Anything.
        longest: Characters, after which it is cut.
    """
    return "".join(c if c.isprintable() else " " for c in text[:longest])


# --- lines ------------------------------------------------------------------------


def to_line(message: Any) -> bytes:
    """Write plain data as a line of JSON."""
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"


def from_json(text: bytes | bytearray | str) -> Any:
    """Read JSON.

    Raises:
        WireError: It is none, is too deep, or has an integer of too many digits.
    """
    try:
        return json.loads(text, parse_int=_integer)
    except (ValueError, RecursionError):  # UnicodeDecodeError is a ValueError
        raise WireError("not JSON") from None


def _integer(text: str) -> int:
    """Read an integer of limited size.

    Python reads 4,300 digits, but does not write a sum that has more.

    Raises:
        ValueError: It has too many digits.
    """
    if len(text) > _DIGITS:
        raise ValueError
    return int(text)


class Lines:
    """Splits received bytes into lines.

    Args:
        limit: The longest line, in bytes.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._rest = bytearray()

    def feed(self, data: bytes) -> Iterator[dict[str, Any]]:
        """Yield the messages that are complete: each is an object in a line.

        A line is read when it is asked for: those after a wrong one cost nothing.

        Raises:
            WireError: A line is too long, or no message.
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


def encode(value: Any) -> Any:
    """Write a dataclass as plain data."""
    return _write(_cached(type(value)), value)


def decode(kind: type[_T], data: object) -> _T:
    """Read plain data.

    Args:
        kind: What it should be.
        data: What has arrived.

    Raises:
        WireError: It is something else.
    """
    form = _cached(kind)
    try:
        value: _T = form.read(data)
    except _FAULTS:
        words = re.sub("(?<=[a-z])(?=[A-Z])", " ", getattr(kind, "__name__", "it"))
        raise WireError(f"not a {words.lower()}") from None
    return value


class _Form(NamedTuple):
    """How values of a type are read and written.

    Attributes:
        read: Returns the value, or raises one of `_FAULTS`.
        write: Returns plain data; ``None`` if the value is that itself.
    """

    read: Callable[[Any], Any]
    write: Callable[[Any], Any] | None = None


def _form(kind: Any) -> _Form:
    origin = typing.get_origin(kind) or kind
    if form := _PLAIN.get(origin):
        return form
    make = _MADE_OF.get(origin) or (_choice if isinstance(kind, EnumMeta) else _fields)
    return make(kind, *typing.get_args(kind))


_cached: Callable[[Any], _Form] = functools.cache(_form)


def _write(form: _Form, value: Any) -> Any:
    return form.write(value) if form.write else value


# --- scalars ----------------------------------------------------------------------


def _exactly(*kinds: type) -> Callable[[Any], Any]:
    """Return what reads exactly one of these types: ``True`` is no number here."""

    def read(value: Any) -> Any:
        if type(value) not in kinds:
            raise TypeError
        return value

    return read


_any_text, _object, _list = _exactly(str), _exactly(dict), _exactly(list, tuple)
_any_number = _exactly(int, float)


def _text(value: Any) -> Any:
    if not _any_text(value).isprintable():
        raise ValueError
    return value


def short_text(most: int) -> _Form:
    """Return the form of a text of so many characters, for ``Annotated``.

    When it is written, it is cut, and has spaces for what cannot be printed. When it is
    read, both are refused.
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


# --- what is made of others -------------------------------------------------------


def _fields(kind: Any) -> _Form:
    hints = typing.get_type_hints(kind, include_extras=True)
    forms = [(name, _form(hint)) for name, hint in hints.items()]
    check = getattr(kind, "check", lambda _: None)

    def read(data: Any) -> Any:
        found = _object(data).get
        value = kind(**{name: form.read(found(name)) for name, form in forms})
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


def _optional(_: Any, kind: Any, _none: Any) -> _Form:
    read, write = _form(kind)
    return _Form(
        lambda data: None if data is None else read(data),
        write and (lambda value: None if value is None else write(value)),
    )


def _tuple(_: Any, *parts: Any) -> _Form:
    if ... in parts:
        return _sequence(_, parts[0])
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


# Also one that cannot be printed.
AnyText = Annotated[str, _Form(_any_text)]

_PLAIN = {
    bool: _Form(_exactly(bool)),
    int: _Form(_exactly(int)),
    float: _Form(_number),
    str: _Form(_text),
    Any: _Form(_text, str),
}
_MADE_OF: dict[Any, Callable[..., _Form]] = {
    **dict.fromkeys((types.UnionType, typing.Union), _optional),
    **dict.fromkeys((list, Sequence), _sequence),
    **dict.fromkeys((dict, Mapping), _mapping),
    tuple: _tuple,
    Annotated: _annotated,
}
