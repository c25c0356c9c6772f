"""A script that uses the MPI of its mpiexec, without a package for it.

MPICH and Intel MPI have the same binary interface; the handles are from its mpi.h.
"""

import ctypes
import os
import sys

COMM_WORLD, INT, SUM = 0x44000000, 0x4C000405, 0x58000003
library = ctypes.CDLL(sys.argv[1])


def call(name: str, *arguments: object) -> None:
    """Call a function of MPI, and fail if it does."""
    if getattr(library, name)(*arguments) != 0:
        sys.exit(f"{name} failed")


call("MPI_Init", None, None)
mine, total = ctypes.c_int(int(os.environ["RANK"]) + 1), ctypes.c_int()
call(
    "MPI_Allreduce",
    *(ctypes.byref(mine), ctypes.byref(total), 1, INT, SUM, COMM_WORLD),
)
call("MPI_Finalize")
sys.stdout.write(f"the sum is {total.value}\n")
