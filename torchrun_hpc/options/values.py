"""The values of options: their types, and how each is read from what the user set.

A reader takes a `Setting`, so that its message names the option or the variable.
"""

from __future__ import annotations

import re
import signal
import threading
from typing import TYPE_CHECKING, NamedTuple

from torchrun_hpc.errors import LaunchError, choices
from torchrun_hpc.host.network import is_number

if TYPE_CHECKING:
    from collections.abc import Callable

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
    return LaunchError("HPC014", f"{setting}: {problem}", everywhere=everywhere)


def text(setting: Setting) -> str:
    """Read any text."""
    return str(setting.value)


def names(setting: Setting) -> tuple[str, ...]:
    """Read names with commas between them."""
    return split_names(str(setting.value))


def split_names(listed: str) -> tuple[str, ...]:
    """Split a list with commas."""
    return tuple(filter(None, map(str.strip, listed.split(","))))


def node_range(setting: Setting) -> NodeRange:
    """Read ``--nnodes``.

    Raises:
        LaunchError: It is neither a number nor a range.
    """
    # Spaces and a plus sign: torch's int() takes them too.
    number = r"\s*\+?([0-9]{1,9})\s*"
    match = re.fullmatch(f"{number}(?::{number})?", str(setting.value))
    low = int(match[1]) if match else 0
    high = int(match[2] or match[1]) if match else 0
    if not 0 < low <= high:
        raise LaunchError(
            "HPC063",
            f"{setting} is not a number of nodes: type a number (4), or a range with "
            "the lower number first (2:4)",
            everywhere=True,
        )
    return NodeRange(low, high)


def workers(setting: Setting) -> int | str:
    """Read ``--nproc-per-node``: a number, or a word that torch understands.

    Raises:
        LaunchError: The number is 0 or less.
    """
    try:
        number = int(setting.value)
    except ValueError:
        return str(setting.value)
    if number < 1:
        raise LaunchError("HPC013", f"{setting} starts no worker", everywhere=True)
    return number


def endpoint(setting: Setting) -> HostPort:
    """Read ``host``, ``host:port``, ``[address]:port``.

    Raises:
        LaunchError: It is none of these.
    """
    typed = str(setting.value).strip()
    if is_number(typed):
        return HostPort(typed)
    match = re.fullmatch(
        r"(?:\[(?P<number>[^\]]+)\]|(?P<name>[\w.-]+))(?::(?P<port>[0-9]{1,5}))?", typed
    )
    if match and (match["name"] or is_number(match["number"])):
        port = None if match["port"] is None else int(match["port"])
        if port is None or port < PORTS_END:
            return HostPort(match["name"] or match["number"], port)
    raise LaunchError(
        "HPC053",
        f"{setting} is not an endpoint: type HOST:PORT (an IPv6 address in brackets, a "
        "port up to 65535)",
        everywhere=True,
    )


def master_port(setting: Setting) -> int:
    """Read ``--master-port``; 0 is any that is free.

    Raises:
        LaunchError: It is no port.
    """
    port = int(setting.value)
    if not 0 <= port < PORTS_END:
        raise LaunchError(
            "HPC050",
            f"{setting} is not a port: type one from 1 to 65535",
            everywhere=True,
        )
    return port


def max_restarts(setting: Setting) -> int:
    """Read ``--max-restarts``.

    Raises:
        LaunchError: It is below 0.
    """
    if setting.value < 0:
        raise wrong_value(setting, "type 0 or more")
    return int(setting.value)


def monitor_interval(setting: Setting) -> float:
    """Read ``--monitor-interval``, in seconds.

    Raises:
        LaunchError: Nobody can wait for so long.
    """
    if not 0 < setting.value < threading.TIMEOUT_MAX:
        raise wrong_value(setting, "type seconds, above 0")
    return float(setting.value)


def signals(setting: Setting) -> tuple[str, ...]:
    """Read ``--signals-to-handle``: torch only warns of a signal that there is not.

    Raises:
        LaunchError: No program can handle one of them.
    """
    found = names(setting)
    for name in found:
        number = getattr(signal, name, signal.SIGTERM)
        if number in _UNCATCHABLE or not isinstance(number, int):
            raise wrong_value(setting, f"{name} cannot be handled")
    return found


def threads(setting: Setting) -> int | str:
    """Read ``--hpc-omp-threads``: a number, or ``auto``.

    Raises:
        LaunchError: It is neither.
    """
    if setting.value == "auto":
        return "auto"
    if re.fullmatch("[1-9][0-9]{0,5}", setting.value):
        return int(setting.value)
    raise LaunchError(
        "HPC090",
        f"{setting}: type a number of threads for each worker, or auto, which divides "
        "the CPUs of this process by the workers",
        everywhere=True,
    )


def binding(setting: Setting) -> str:
    """Read ``--hpc-bind``.

    Raises:
        LaunchError: It is no way to bind.
    """
    if setting.value not in BINDINGS:
        raise LaunchError(
            "HPC219",
            f"{setting}: this is no way to bind. {choices(setting.value, BINDINGS)}",
            everywhere=True,
        )
    return str(setting.value)


def rendezvous(setting: Setting) -> str:
    """Read ``--hpc-rendezvous``.

    Raises:
        LaunchError: It is none of those that there are.
    """
    kinds = ("auto", SCHEDULER, C10D)
    if setting.value not in kinds:
        raise LaunchError(
            "HPC110", f"{setting}: {choices(setting.value, kinds)}", everywhere=True
        )
    return str(setting.value)


def is_module(name: str) -> bool:
    """Return whether this can be a module's name, as it stands after ``import``."""
    return all(map(str.isidentifier, name.split(".")))


def modules(setting: Setting) -> tuple[str, ...]:
    """Read ``--hpc-preload``; no modules for ``none``.

    Raises:
        LaunchError: One of them cannot be the name of a module.
    """
    if setting.value == NONE:
        return ()
    found = tuple(name.strip() for name in setting.value.split(","))
    for name in found:
        if not is_module(name):
            raise LaunchError(
                "HPC168",
                f"{setting}: {name!r} is no name of a module. Type names with commas "
                f"between them, --hpc-preload=torch,numpy, or {NONE}",
                everywhere=True,
            )
    return found


def stall(setting: Setting) -> int:
    """Read ``--hpc-stall-report``, in seconds.

    Raises:
        LaunchError: It is no number of seconds.
    """
    if not re.fullmatch(r"[1-9][0-9]{0,6}", setting.value):
        raise LaunchError(
            "HPC174",
            f"{setting}: type whole seconds, longer than any pause of the training: "
            "--hpc-stall-report=600",
            everywhere=True,
        )
    return int(setting.value)


def whole(example: str) -> Callable[[Setting], int]:
    """Return a reader of whole numbers from 0.

    Args:
        example: What to type instead of something else.
    """

    def read(setting: Setting) -> int:
        if not re.fullmatch(r"[0-9]{1,6}", setting.value):
            raise LaunchError("HPC205", f"{setting}: type {example}", everywhere=True)
        return int(setting.value)

    return read


def dry_run(setting: Setting) -> str:
    """Read ``--hpc-dry-run``.

    Raises:
        LaunchError: There is no such form of it.
    """
    if setting.value not in DRY_RUN:
        raise wrong_value(setting, f"type one of {', '.join(DRY_RUN)}")
    return str(setting.value)
