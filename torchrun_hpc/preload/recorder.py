"""A fork's answers to its agent: its stack, and its latest collectives.

Only the process itself can read torch's flight recorder. The agent asks through a pair
of sockets that no other process can use. A thread answers while the main thread waits.
"""

from __future__ import annotations

import _thread  # noqa: PLC2701 - such a thread is not in threading.enumerate()
import contextlib
import json
import signal
import socket
import sys
import threading
import time
import traceback
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torchrun_hpc import wire
from torchrun_hpc.failures.failure import is_of_collective
from torchrun_hpc.failures.last_words import LAUNCHER, SENT
from torchrun_hpc.preload import worker
from torchrun_hpc.stacks.calls import (
    ASK_ALL,
    AT_END,
    IMPORTS,
    ForkAnswer,
    groups_of,
    title,
)

if TYPE_CHECKING:
    from collections.abc import Iterable
    from types import FrameType

    _Walk = Iterable[tuple[FrameType, int]]

_FRAMES = 200  # the innermost ones
_C10D = "torch.distributed.distributed_c10d"
# Of torch._C._distributed_c10d, since torch 2.8 and 2.6; earlier only as a pickle.
_DUMPS = ("_dump_fr_trace_json", "_dump_nccl_trace_json")


def start(questions: socket.socket) -> None:
    """Answer the agent in a thread, if torch's distributed package is imported.

    The script does not see this thread in ``threading``, and it takes no signal.
    """
    questions.set_inheritable(False)
    if _C10D not in sys.modules:
        questions.close()
        return
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    _thread.start_new_thread(_serve, (questions,))
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _serve(questions: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while question := questions.recv(1):
            main = sys._current_frames()[threading.main_thread().ident or 0]  # noqa: SLF001
            walk = reversed([*traceback.walk_stack(main)])
            _tell(questions, walk, with_groups=question == ASK_ALL)


def leave(questions: socket.socket, error: BaseException) -> None:
    """Tell the agent why this process ends. The agent reads that later.

    It includes the collectives only after an error of a collective.
    """
    _tell(questions, traceback.walk_tb(error.__traceback__), error)


def _tell(
    questions: socket.socket,
    walk: _Walk,
    error: BaseException | None = None,
    *,
    with_groups: bool = False,
) -> None:
    with contextlib.suppress(Exception):  # the script ends as it would without this
        text = "" if error is None else _written(error)
        record = ForkAnswer(_frames(walk)[-_FRAMES:], error=text, time=time.time())
        if with_groups or is_of_collective(text):
            with contextlib.suppress(Exception):  # torch may have any state
                record = replace(record, groups=_groups())
        line = wire.to_line(wire.encode(record))
        questions.send(line if error is None else AT_END + line, socket.MSG_DONTWAIT)


def _written(error: BaseException) -> str:
    """Return what Python writes about the exception that ends a process.

    Python writes nothing about an exit code, so return the exception: the agent learns
    that the script has chosen the code.
    """
    if isinstance(error, SystemExit):
        return repr(error) if isinstance(error.code, int) else str(error.code)
    shown = worker.traceback_of(error)
    return "".join(traceback.format_exception(type(error), error, shown))[-SENT:]


def _frames(walk: _Walk) -> tuple[str, ...]:
    """Return the frames after the launcher's, from the outermost one on."""
    frames: list[str] = []
    for frame, line in walk:
        code = frame.f_code
        if LAUNCHER in code.co_filename:
            frames.clear()
        elif not code.co_filename.startswith(IMPORTS):
            frames.append(f"{code.co_name} {_short(code.co_filename)}:{line}")
    return tuple(frames)


def _short(name: str) -> str:
    """Return the name of a file as py-spy writes it: relative to `sys.path`."""
    folders = (f"{path}/" for path in sys.path if path)
    return name.removeprefix(max(filter(name.startswith, folders), key=len, default=""))


def _groups() -> Any:
    modules: dict[str, Any] = sys.modules
    torch, native = modules.get(_C10D), modules.get("torch._C._distributed_c10d")
    dumps = [getattr(native, name) for name in _DUMPS if hasattr(native, name)]
    if torch is None or not dumps:
        return ()
    sizes = {
        title(name, getattr(group, "group_desc", "")): group.size()
        for group, name in torch._world.pg_names.items()  # noqa: SLF001
    }
    return groups_of(json.loads(dumps[0]()), sizes)
