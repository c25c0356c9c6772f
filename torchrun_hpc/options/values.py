"""The values of options: their types, and how each is read from what the user set.

A reader takes a `Setting`, so that its message names the option or the variable. It
raises `LaunchError` if the value cannot be used.
"""

from __future__ import annotations

import math
import re
import signal
import threading
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from torchrun_hpc.errors import LaunchError, choices
from torchrun_hpc.host.network import is_number

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from torchrun_hpc.setting import Setting

# Kinds of rendezvous.
STATIC = "static"
C10D = "c10d"
SCHEDULER = "scheduler"  # ours, for nodes that the scheduler has numbered
DIRECT = "direct"  # none: each task is a worker

NONE = "none"  # switches an option off

# How workers can be bound to CPUs.
BIND_GPU, BIND_EVEN, BIND_NONE = BINDINGS = ("gpu", "even", NONE)

DRY_RUN = {
    "table": "Start nothing: meet the other nodes, and print on node 0 what would be "
    "done, value by value with its source, and the same with plain torchrun.",
    "json": "The same for machines.",
}

PORTS_END = 2**16

_UNCATCHABLE = (signal.SIGKILL, signal.SIGSTOP)


_Value = TypeVar("_Value")


class NodeRange(NamedTuple):
    """The fewest and the most nodes of a world."""

    low: int
    high: int


class HostPort(NamedTuple):
    """A host by name or number, and its port; ``None`` if only the host is typed."""

    host: str
    port: int | None = None


def wrong_value(
    setting: Setting | str, problem: str, *, everywhere: bool = True
) -> LaunchError:
    """Return the refusal of a value that torchrun would end with a traceback."""
    text = f"{setting}: {problem.removeprefix(': ')}"
    return LaunchError("HPC014", text, everywhere=everywhere)


def reader(
    code: str, read: Callable[[Any], _Value], wrong: str
) -> Callable[[Setting], _Value]:
    """Return a reader.

    Args:
        code: Of the message; empty for that of `wrong_value`.
        read: Returns the value; ``ValueError`` if it cannot be used. Its text, if it
            has one, goes before ``wrong``.
        wrong: What follows the option in the message.
    """

    def read_setting(setting: Setting) -> _Value:
        try:
            return read(setting.value)
        except ValueError as error:
            problem = f"{error}{wrong}"
            if not code:
                raise wrong_value(setting, problem) from None
            text = f"{setting}{problem}"
            raise LaunchError(code, text, everywhere=True) from None

    return read_setting


def text(setting: Setting) -> str:
    """Read any text."""
    return str(setting.value)


def names(setting: Setting) -> tuple[str, ...]:
    """Read names with commas between them."""
    return split_names(str(setting.value))


def split_names(listed: str) -> tuple[str, ...]:
    """Split a list with commas."""
    return tuple(filter(None, map(str.strip, listed.split(","))))


def workers(setting: Setting) -> int | str:
    """Read ``--nproc-per-node``: a number, or a word that torch understands."""
    try:
        number = int(setting.value)
    except ValueError:
        return str(setting.value)
    if number < 1:
        raise LaunchError("HPC013", f"{setting} starts no worker", everywhere=True)
    return number


def signals(setting: Setting) -> tuple[str, ...]:
    """Read ``--signals-to-handle``: torch only warns of a signal that there is not."""
    found = names(setting)
    for name in found:
        number = getattr(signal, name, signal.SIGTERM)
        if number in _UNCATCHABLE or not isinstance(number, int):
            raise wrong_value(setting, f"{name} cannot be handled")
    return found


def is_module(name: str) -> bool:
    """Return whether this can be a module's name, as it stands after ``import``."""
    return all(map(str.isidentifier, name.split(".")))


def whole(example: str) -> Callable[[Setting], int]:
    """Return a reader of whole numbers from 0; ``example`` is what to type instead."""
    return reader("HPC205", _matching("[0-9]{1,6}", int), f": type {example}")


def _matching(pattern: str, read: Callable[[str], _Value]) -> Callable[[str], _Value]:
    """Return a function that reads what matches a pattern."""

    def read_matching(value: str) -> _Value:
        if not re.fullmatch(pattern, str(value)):
            raise ValueError
        return read(str(value))

    return read_matching


def _one_of(known: Collection[str]) -> Callable[[str], str]:
    """Return a function that takes one of some words."""

    def read_word(value: str) -> str:
        if value not in known:
            raise ValueError(f": {choices(value, known)}")
        return value

    return read_word


def _within(kind: type, least: float, most: float) -> Callable[[float], Any]:
    """Return a function that takes a number between two others, which do not count."""

    def read_number(value: float) -> Any:
        if not least < value < most:
            raise ValueError
        return kind(value)

    return read_number


def _node_range(value: str) -> NodeRange:
    # Spaces and a plus sign: torch's int() takes them too.
    number = r"\s*\+?([0-9]{1,9})\s*"
    match = re.fullmatch(f"{number}(?::{number})?", value)
    low, high = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 0 < low <= high:
        raise ValueError
    return NodeRange(low, high)


def _endpoint(value: str) -> HostPort:
    typed = value.strip()
    if is_number(typed):
        return HostPort(typed)
    match = re.fullmatch(
        r"(?:\[(?P<number>[^\]]+)\]|(?P<name>[\w.-]+))(?::(?P<port>[0-9]{1,5}))?", typed
    )
    if match and (match["name"] or is_number(match["number"])):
        port = None if match["port"] is None else int(match["port"])
        if port is None or port < PORTS_END:
            return HostPort(match["name"] or match["number"], port)
    raise ValueError


def _modules(value: str) -> tuple[str, ...]:
    found = () if value == NONE else tuple(map(str.strip, value.split(",")))
    for name in found:
        if not is_module(name):
            raise ValueError(f": {name!r} is no name of a module")
    return found


node_range = reader(
    "HPC063",
    _node_range,
    " is not a number of nodes: type a number (4), or a range with the lower number "
    "first (2:4)",
)
endpoint = reader(
    "HPC053",
    _endpoint,
    " is not an endpoint: type HOST:PORT (an IPv6 address in brackets, a port up to "
    "65535)",
)
master_port = reader(
    "HPC050",
    _within(int, -1, PORTS_END),
    " is not a port: type one from 1 to 65535",
)
max_restarts = reader("", _within(int, -1, math.inf), ": type 0 or more")
monitor_interval = reader(
    "", _within(float, 0, threading.TIMEOUT_MAX), ": type seconds, above 0"
)
threads = reader(
    "HPC090",
    _matching("auto|[1-9][0-9]{0,5}", lambda t: t if t == "auto" else int(t)),
    ": type a number of threads for each worker, or auto, which divides the CPUs of "
    "this process by the workers",
)
binding = reader("HPC219", _one_of(BINDINGS), "")
rendezvous = reader("HPC110", _one_of(("auto", SCHEDULER, C10D)), "")
modules = reader(
    "HPC168",
    _modules,
    ". Type names with commas between them, --hpc-preload=torch,numpy, or none",
)
stall = reader(
    "HPC174",
    _matching("[1-9][0-9]{0,6}", int),
    ": type whole seconds, longer than any pause of the training: "
    "--hpc-stall-report=600",
)
dry_run = reader("", _one_of(DRY_RUN), "")
