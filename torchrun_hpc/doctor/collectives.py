"""The script of the doctor's launch: each worker computes and communicates.

It starts like a job, also with torchrun: ``python -m torchrun_hpc [OPTIONS] -m
torchrun_hpc.doctor.collectives MAX_BYTES TIMEOUT``. All workers append their results to
the file that the variable `DOCTOR_RESULTS` names, or write them to stdout. Each result
is a line of JSON, written at once, so that lines of workers do not mix. It has a field
of `LaunchEnd`; lists are joined:

- ``{"at": [[RANK, [NUMBER, TEXT]]]}`` from each worker before each step. The import of
  torch is the first. If all others wait, a missing worker has begun fewer steps.
- ``{"imports": [Torch]}`` from each worker whose LOCAL_RANK is 0
- ``{"backend": NAME}`` from rank 0, when all workers have met
- ``{"rows": [Collective]}`` from one worker of an operation. Its scope is empty, or
  ``node`` and the rank of a node in the launch.
- ``{"workers": [WorkerReport]}`` from each worker at its end; the node is -1.
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

from torchrun_hpc import wire
from torchrun_hpc.doctor.results import Torch, writer
from torchrun_hpc.reporting import streams
from torchrun_hpc.schedulers.process import environment
from torchrun_hpc.variables import LOCAL_RANK, RANK


def main() -> None:
    """Run as a worker, to the end of the process."""
    environ, code = environment(), 0
    try:
        write = writer(environ)
        write("at", [[int(environ[RANK]), [-1, "the import of torch"]]])
        imported = _import_torch()
        if environ[LOCAL_RANK] == "0":
            write("imports", [wire.encode(imported)])
        from torchrun_hpc.doctor import operations  # noqa: PLC0415 - imports torch

        timeout = timedelta(seconds=float(sys.argv[2]))
        operations.run(environ, int(sys.argv[1]), timeout, write)
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
    libraries = {"cuda": torch.version.cuda, "hip": torch.version.hip}
    with contextlib.suppress(AttributeError, RuntimeError):  # a torch for CPUs
        libraries["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
        libraries["cudnn"] = torch.backends.cudnn.version()
    releases = {name: str(release) for name, release in libraries.items() if release}
    return Torch(str(torch.__version__), import_s, releases, torch.cuda.device_count())


if __name__ == "__main__":
    main()
