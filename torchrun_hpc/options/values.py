"""The values of options: their types and readers.

A reader takes a `Setting`. It raises `LaunchError` if the value is wrong.
"""

from __future__ import annotations

import re
import signal
import threading
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from torchrun_hpc.errors import LaunchError, choices
from torchrun_hpc.host.network import is_number

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from torchrun_hpc.errors import Setting

    Reader = Callable[[Setting], Any]

# Kinds of rendezvous.
STATIC = "static"
C10D = "c10d"
SCHEDULER = "scheduler"  # ours, for nodes with ranks from the scheduler
DIRECT = "direct"  # none: each task is a worker

NONE = "none"  # switches an option off

# Whether nodes prove that they belong to the job.
REQUIRE = "require"
AUTH = ("auto", REQUIRE, NONE)

# How workers can be bound to CPUs.
BIND_GPU, BIND_EVEN, BIND_NONE = "gpu", "even", NONE
BINDINGS = (BIND_GPU, BIND_EVEN, BIND_NONE)

DRY_RUN = {
    "table": "Start nothing. Print on the head node what all nodes would do, with the "
    "source of each value, and a plain torchrun command for the same launch. With "
    "--hpc-debug, also list the changes inside PyTorch. Default: off.",
    "json": "Do the same as --hpc-dry-run, but print JSON.",
}

PORTS_END = 2**16
MOST_WORKERS = 2**22  # PID_MAX_LIMIT in Linux's include/linux/threads.h
LARGEST = 10**9 - 1  # of other numbers

_UNCATCHABLE = (signal.SIGKILL, signal.SIGSTOP)

_Value = TypeVar("_Value")


class NodeRange(NamedTuple):
    """The smallest and the largest number of nodes of a world."""

    low: int
    high: int


class HostPort(NamedTuple):
    """A host by name or number, and its port; ``None`` without a port."""

    host: str
    port: int | None = None


def reader(read: Callable[[Any], Any], wrong: str = "") -> Reader:
    """Return a reader that refuses a value if ``read`` raises ``ValueError``.

    The message consists of the setting, the error's text, and ``wrong``.
    """

    def read_setting(setting: Setting) -> Any:
        try:
            return read(setting.value)
        except ValueError as error:
            text = f"{setting}{error}{wrong}"
            raise LaunchError("HPC014", text, everywhere=True) from None

    return read_setting


def split_names(listed: str) -> tuple[str, ...]:
    """Split a list at its commas; leave out blanks and empty names."""
    return tuple(filter(None, map(str.strip, listed.split(","))))


def is_module(name: str) -> bool:
    """Return whether a text can be a module's name, as after ``import``."""
    return all(map(str.isidentifier, name.split(".")))


def whole(example: str) -> Reader:
    """Return a reader of whole numbers from 0 to 999,999, with an example."""
    return reader(lambda v: _number(v, "[0-9]{1,6}"), f": use {example}")


def _checked(value: _Value, is_right: object) -> _Value:
    if not is_right:
        raise ValueError
    return value


def _number(value: str, pattern: str) -> int:
    return int(_checked(value, re.fullmatch(pattern, str(value))))


def _word(value: str, words: Collection[str]) -> str:
    if value not in words:
        raise ValueError(f": {choices(value, words)}")
    return value


def _workers(value: int | str) -> int | str:
    try:
        number = int(value)
    except ValueError:
        return str(value)
    return _checked(number, 0 < number <= MOST_WORKERS)


def _signals(value: str) -> tuple[str, ...]:
    names = split_names(value)
    for name in names:
        number = getattr(signal, name, signal.SIGTERM)
        if number in _UNCATCHABLE or not isinstance(number, int):
            raise ValueError(f": {name}")
    return names


def _threads(value: str) -> int | str:
    return value if value == "auto" else _number(value, "[1-9][0-9]{0,5}")


def _node_range(value: str) -> NodeRange:
    # Torch's int() also takes spaces and a plus sign.
    number = r"\s*\+?([0-9]{1,9})\s*"
    match = re.fullmatch(f"{number}(?::{number})?", value)
    low, high = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    return _checked(NodeRange(low, high), 0 < low <= high)


def _endpoint(value: str) -> HostPort:
    text = value.strip()
    if is_number(text):
        return HostPort(text)
    match = re.fullmatch(r"(?:\[([^\]]+)\]|([\w.-]+))(?::([0-9]{1,5}))?", text)
    number, name, port = match.groups() if match else ("", "", None)
    endpoint = HostPort(name or number, None if port is None else int(port))
    is_right = (name or is_number(number)) and (endpoint.port or 0) < PORTS_END
    return _checked(endpoint, is_right)


def _modules(value: str) -> tuple[str, ...]:
    names = () if value == NONE else tuple(map(str.strip, value.split(",")))
    for name in names:
        if not is_module(name):
            raise ValueError(f": {name!r} is not the name of a module")
    return names


node_range = reader(
    _node_range,
    " is not a number of nodes. Use a number (4), or a range with the lower number "
    "first (2:4)",
)
endpoint = reader(
    _endpoint,
    " is not an endpoint. Use HOST:PORT, with an IPv6 address in brackets and a port "
    "up to 65535",
)
_NO_PORT = " is not a port. Use a number from 1 to 65535, or "
master_port = reader(
    lambda port: _checked(port, 0 <= port < PORTS_END), f"{_NO_PORT}remove it"
)
port = reader(  # in MASTER_PORT
    lambda text: _checked(text, 0 < _number(text, "[0-9]{1,5}") < PORTS_END),
    f"{_NO_PORT}unset it",
)
backend = reader(
    lambda word: _checked(str(word), word not in {SCHEDULER, DIRECT}),
    ": torch has no such backend. Use c10d, or remove the option",
)
workers = reader(_workers, f": use 1 to {MOST_WORKERS} workers, or gpu")
number = reader(lambda n: _checked(n, abs(n) <= LARGEST), f": use at most {LARGEST}")
max_restarts = reader(lambda n: _checked(n, 0 <= n <= LARGEST), f": use 0 to {LARGEST}")
monitor_interval = reader(
    lambda seconds: _checked(seconds, 0 < seconds < threading.TIMEOUT_MAX),
    ": use a number of seconds above 0",
)
names = reader(split_names)
signals = reader(_signals, " cannot be handled. Remove it")
threads = reader(
    _threads,
    ": use a number of threads per worker, or auto, which divides the CPUs of this "
    "process by the workers",
)
binding = reader(lambda word: _word(word, BINDINGS))
auth = reader(lambda word: _word(word, AUTH))
rendezvous = reader(lambda word: _word(word, ("auto", SCHEDULER, C10D)))
modules = reader(
    _modules,
    ". Use names with commas, such as --hpc-preload=torch,numpy, or auto, or none",
)
read_ahead = reader(lambda word: _word(word, ("auto", NONE)))
stall = reader(
    lambda word: 0 if word == NONE else _number(word, "[1-9][0-9]{0,6}"),
    ": use whole seconds, more than any pause of the training takes, such as "
    "--hpc-stall-report=600, or none",
)
dry_run = reader(lambda word: _word(word, DRY_RUN))
