"""The script of the doctor's launch: each worker computes and communicates.

It starts like a job, also with torchrun: ``python -m torchrun_hpc [OPTIONS] -m
torchrun_hpc.doctor.collectives MAX_BYTES TIMEOUT``. All workers append their results to
the file that the variable `RESULTS` names, or write them to stdout. Each result is a
line of JSON, written at once, so that lines of workers do not mix:

- ``{"at": [RANK, NUMBER, TEXT]}`` from each worker before each step. The import of
  torch is the first. If all others wait, a missing worker has begun fewer steps.
- ``{"torch": Torch}`` from each worker whose LOCAL_RANK is 0
- ``{"backend": NAME}`` from rank 0, when all workers have met
- ``{"row": Collective}`` from one worker of an operation. Its scope is empty, or
  ``node`` and the rank of a node in the launch.
- ``{"worker": Worker}`` from each worker at its end; the node is -1.
"""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import os
import sys
import time
import traceback
from datetime import timedelta
from typing import Any

from torchrun_hpc import wire
from torchrun_hpc.doctor.results import RESULTS, Torch
from torchrun_hpc.reporting import streams
from torchrun_hpc.schedulers.process import environment


def main() -> None:
    """Run as a worker, to the end of the process."""
    environ, code = environment(), 0
    try:
        path = environ.get(RESULTS)
        output = os.open(path, os.O_WRONLY | os.O_APPEND) if path else os.dup(1)

        def write(kind: str, value: Any) -> None:
            os.write(output, wire.to_line({kind: value}))

        write("at", [int(environ["RANK"]), -1, "the import of torch"])
        found = _import_torch()
        if environ["LOCAL_RANK"] == "0":
            write("torch", wire.encode(found))
        from torchrun_hpc.doctor import session  # noqa: PLC0415 - imports torch

        timeout = timedelta(seconds=float(sys.argv[2]))
        session.run(environ, int(sys.argv[1]), timeout, write)
    except BaseException:  # noqa: BLE001 - all are shown
        traceback.print_exc()
        code = 1
    for stream in (sys.stderr, sys.stdout):
        streams.flush(stream)
    # At a normal exit, threads of NCCL and gloo can wait for others. With --run-path,
    # torch runs this in a function, and waits for its result.
    if code or multiprocessing.parent_process() is None:
        os._exit(code)


def _import_torch() -> Torch:
    start = time.perf_counter()
    torch = importlib.import_module("torch")
    import_s = time.perf_counter() - start
    known = {"cuda": torch.version.cuda, "hip": torch.version.hip}
    with contextlib.suppress(AttributeError, RuntimeError):  # a torch for CPUs
        known["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
        known["cudnn"] = torch.backends.cudnn.version()
    known = {name: str(release) for name, release in known.items() if release}
    return Torch(str(torch.__version__), import_s, known, torch.cuda.device_count())


if __name__ == "__main__":
    main()
