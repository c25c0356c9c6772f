"""On a slow file system, other processes read the files that the launcher imports."""

from __future__ import annotations

import collections
import contextlib
import os
import shutil
import subprocess
import sys
import zipfile
from compileall import compile_file
from functools import partial
from importlib.util import cache_from_source
from typing import IO, cast

import pytest

from tests.support import ROOT
from tests.support.cluster.commands import BIN, require, require_package
from tests.support.cluster.testbed import Cluster, missing
from tests.support.patience import until, without_waits
from tests.support.python_programs import load
from torchrun_hpc import programs
from torchrun_hpc.host import sockets
from torchrun_hpc.preload import read_ahead

HOST = "n1"
LATENCY = 1  # milliseconds

SCRIPT = """
import sys
sys.stdout.write("fork" if "torchrun_hpc" in sys.modules else "exec")
"""


@pytest.fixture(scope="module")
def slow():
    require(missing())
    require(None if shutil.which("fusermount3") else "fuse3 is not installed")
    require_package("mfusepy")
    return load(ROOT / "benchmarks" / "cold.py").slow


def test_files_are_read_ahead(slow, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    words = ["python", "-m", "torchrun_hpc", "--hpc-preload=torch", "--standalone"]
    environ = {"PATH": f"{BIN}:/usr/bin:/bin"}
    asked: collections.Counter[str] = collections.Counter()
    with Cluster((HOST,), slurm=False) as cluster, slow(cluster, 1, LATENCY, asked):
        done = cluster.run([*words, script], host=HOST, env=environ, cwd=ROOT)
        running = cluster.run(["pgrep", "-f", "read_ahead"], host=HOST)
    assert (done.returncode, done.stdout) == (0, "fork"), done.stderr
    assert len(without_waits(done.stderr.splitlines())) == 1  # the start line
    assert not running.stdout
    # Two processes opened the files that torch's import reads.
    assert asked["opens"] - asked["files"] > 500


def test_the_program_holds_the_lock_until_its_end(monkeypatch, tmp_path):
    """Not its launcher, whose forks run on."""
    hold = sockets.hold
    monkeypatch.setattr(sockets, "hold", lambda what: hold(f"{what} {tmp_path}"))
    monkeypatch.setattr(read_ahead, "_is_slow", lambda: True)
    for _ in range(2):
        read_ahead.start("torch")
    (program,) = read_ahead._readers
    with pytest.raises(BlockingIOError):
        sockets.hold("read-ahead")
    assert program.poll() is None
    read_ahead.end()
    sockets.hold("read-ahead").close()


# --- what it does not run -------------------------------------------------------------

TRAP = "import pathlib\npathlib.Path(__file__ + '.ran').touch()\n"


class ReadAhead:
    """The program; it is started again if another launch's has just run."""

    def __init__(self, *folders):
        self._folders = [str(folder) for folder in folders]
        self._start()

    def _start(self):
        pipe = {"stdin": subprocess.PIPE, "bufsize": 0}
        self._running = programs.start("read_ahead", *self._folders, **pipe)
        self._names = cast("IO[bytes]", self._running.stdin)
        with contextlib.suppress(BrokenPipeError):
            self._names.write(b"package\nzipped.inner\nmissing\ncsv\n")

    def reads(self, fifo):
        """Return whether it is just reading this file, and end the file."""
        if self._running.poll() is not None:
            self.end()
            self._start()
        with contextlib.suppress(OSError):  # nobody has it open
            os.close(os.open(fifo, os.O_WRONLY | os.O_NONBLOCK))
            return True
        return False

    def end(self):
        self._names.close()
        self._running.wait()


def test_no_module_of_the_users_folders_is_run(tmp_path):
    """Each of Python's own modules has a namesake, which an import would prefer."""
    archive, packages = tmp_path / "zipped.egg", tmp_path / "packages"
    for name in sys.stdlib_module_names:
        (tmp_path / "traps" / name).mkdir(parents=True)
        (tmp_path / "traps" / name / "__init__.py").write_text(TRAP)
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as zipped:
        for name in ("zipped/__init__.py", "zipped/inner.py"):
            zipped.writestr(name, TRAP)
        zipped.writestr("EGG-INFO/PKG-INFO", "Name: zipped\n")
        zipped.writestr("EGG-INFO/entry_points.txt", "[group]\nname = zipped.inner\n")
    source = packages / "package" / "__init__.py"
    source.parent.mkdir(parents=True)
    source.write_text(f"{TRAP}import package.last\n")
    source.with_name("last.py").touch()
    compile_file(source, quiet=1)
    last_module = cache_from_source(source.with_name("last.py"))
    last_file = packages / "name-1.dist-info" / "entry_points.txt"
    last_file.parent.mkdir()
    for fifo in (last_module, last_file):
        os.mkfifo(fifo)

    def is_read_or_run(fifo):
        return program.reads(fifo) or [*tmp_path.rglob("*.ran")]

    program = ReadAhead(tmp_path / "traps", archive, packages)
    try:
        for fifo in (last_module, last_file):
            until(partial(is_read_or_run, fifo))
    finally:
        program.end()
    assert not [*tmp_path.rglob("*.ran")]
