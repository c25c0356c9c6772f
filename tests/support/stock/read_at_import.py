"""The environment variables that ``import torch`` reads, with the installed torch.

    python -m tests.support.stock.read_at_import [--write]

A process imports torch. A class of ``os.environ`` records what Python code reads, and
``getenv.c`` what libraries read by getenv(3). Neither sees a library that reads
``environ`` itself. The program prints the names that are not in
``torchrun_hpc/preload/read_at_import.txt``, each with its reader. ``--write`` adds them
to that file: to the first section if Python code reads them, to the third one if a
library of CUDA does, otherwise to the second one.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from fnmatch import fnmatchcase
from pathlib import Path

from tests.support import ROOT

FOLDER = Path(__file__).parent
DATA = ROOT / "torchrun_hpc" / "preload" / "read_at_import.txt"
CUDA = re.compile(r"/cuda/|/lib(cu|nv|c10_cuda|torch_cuda)[^/]*$")

# Set for the import. Only code that reads all variables reads it.
ALL = "READ_BY_WHO_READS_ALL"

# Names that are not in the file, and why.
NOT_OF_TORCH = {
    "HOME": "a folder of the user",
    "PATH": "the folders of programs",
    "TMPDIR": "a folder for files of any program",
    "XDG_*": "folders of the user",
    "LANG": "the language of any program",
    "LC_*": "the language of any program",
    "LD_*": "read when a program starts",
    "PYTHON*": "read when a program starts",
    "_PYTHON_*": "for the installation of Python",
    "GLIBCXX_TUNABLES": "the memory of libstdc++",
    "AS_SECURE_LOG_FILE": "LLVM's own, in the compilers of PyTorch and CUDA",
    "LLVM_*": "LLVM's own",
    "bar": "LLVM's own",
    "CUDA_7a3f9c2d": "without a documented meaning",
}

# Code that reads all variables, and what it takes; the file has these.
READS_ALL = {"/tqdm/utils.py": "TQDM_*"}

RECORD = """
import ctypes, os, sys

class Recorded(type(os.environ)):
    def __getitem__(self, name):
        frame = sys._getframe(1)
        while frame.f_globals["__name__"] in {"os", "collections.abc"}:
            frame = frame.f_back
        print(name, frame.f_code.co_filename, file=log)
        return super().__getitem__(name)

log = open(sys.argv[1], "w", buffering=1)
os.environ.__class__ = Recorded
ctypes.CDLL(None).record_to(log.fileno())
import torch
"""


def read() -> dict[str, str]:
    """Return the names that the import reads, each with a file that reads it."""
    with tempfile.TemporaryDirectory() as folder:
        library, log = f"{folder}/getenv.so", Path(folder) / "log"
        compiler = ["cc", "-shared", "-fPIC", "-o", library]
        subprocess.run([*compiler, FOLDER / "getenv.c", "-ldl"], check=True)
        environ = {"PATH": "/usr/bin:/bin", "HOME": folder, ALL: "1"}
        command = [sys.executable, "-W", "ignore", "-c", RECORD, str(log)]
        subprocess.run(command, env=environ | {"LD_PRELOAD": library}, check=True)
        lines = [line.split(" ", 1) for line in log.read_text().splitlines()]
    return {
        name: reader
        for name, reader in lines
        if not (name == ALL and reader.endswith(tuple(READS_ALL)))
        and not any(fnmatchcase(name, pattern) for pattern in NOT_OF_TORCH)
    }


def missing() -> dict[str, str]:
    """Return the names that are not in the file, each with a file that reads it."""
    from torchrun_hpc.preload.plan import is_read  # noqa: PLC0415

    return {name: reader for name, reader in read().items() if not is_read(name)}


def write(names: dict[str, str]) -> None:
    """Add names to the file."""
    sections = DATA.read_text().strip().split("\n\n")
    for name, reader in names.items():
        number = 0 if reader.endswith(".py") else 2 if CUDA.search(reader) else 1
        lines = sections[number].splitlines()
        comments = [line for line in lines if line.startswith("#")]
        listed = sorted({name, *lines} - {*comments})
        sections[number] = "\n".join([*comments, *listed])
    DATA.write_text("\n\n".join(sections) + "\n")


if __name__ == "__main__":
    new = missing()
    for name, reader in sorted(new.items()):
        print(name, reader)
    if "--write" in sys.argv:
        write(new)
