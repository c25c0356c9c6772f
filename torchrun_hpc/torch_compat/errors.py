"""Exceptions that end an agent, torch's and others, as a `Failure`."""

from __future__ import annotations

import time
from dataclasses import replace

from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from torchrun_hpc.errors import LaunchError
from torchrun_hpc.failures.failure import Failure, Kind, WorkerPart


def failure_of(error: BaseException) -> Failure:
    """Return the failure of an agent that an exception ends; its node is not set."""
    if isinstance(error, ChildFailedError):
        rank, worker = error.get_first_failure()
        part, code = WorkerPart(rank), worker.exitcode
        return Failure(Kind.WORKER, code=code, time=time.time(), worker=part)
    own = Failure(Kind.AGENT, time=time.time())
    if isinstance(error, SignalException):
        return replace(own, kind=Kind.SIGNAL, code=int(error.sigval))
    if isinstance(error, OSError):
        file = f": {error.filename}" if error.filename else ""
        return replace(own, text=f"{error.strerror or error}{file}")
    name = error.code if isinstance(error, LaunchError) else type(error).__name__
    return replace(own, text=f"{name} {error}")
