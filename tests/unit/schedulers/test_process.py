"""What is read of this process, and of files."""

from __future__ import annotations

import os
import subprocess
import sys

from torchrun_hpc.schedulers.process import read, this_process


def test_the_processes_above_this_one():
    code = "from torchrun_hpc.schedulers.process import this_process as p; print(p())"
    done = subprocess.run(
        ["sh", "-c", f'{sys.executable} -c "$0"; true', code],
        capture_output=True,
        text=True,
        check=True,
    )
    above = this_process().ancestors
    with open(f"/proc/{os.getpid()}/comm", encoding="utf-8") as file:  # noqa: PTH123
        own = file.read().strip()
    assert f"ancestors={('sh', own, *above)}" in done.stdout
    pids = this_process().ancestor_pids
    assert pids[0] == os.getppid()
    assert f", {(os.getpid(), *pids)}"[3:] in done.stdout


def test_a_file_that_cannot_be_read(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for path in (pipe, tmp_path, tmp_path / "missing", "", "a\0b"):
        assert read(str(path)) is None


def test_a_file_of_bytes_that_are_no_text(tmp_path):
    file = tmp_path / "nodes"
    file.write_bytes(b"jwb0001\n\xff")
    assert read(str(file)) == "jwb0001\n\ufffd"
