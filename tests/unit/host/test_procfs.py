"""The facts about this process, and the reader of files."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from tests.support.patience import until
from torchrun_hpc.host import procfs
from torchrun_hpc.host.procfs import read


def test_a_file_that_cannot_be_read(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for path in (pipe, tmp_path, tmp_path / "missing", "", "a\0b"):
        assert read(str(path)) is None


def test_a_file_of_bytes_that_are_no_text(tmp_path):
    file = tmp_path / "nodes"
    file.write_bytes(b"jwb0001\n\xff")
    assert read(str(file)) == "jwb0001\n\ufffd"


def test_a_long_file(tmp_path):
    file = tmp_path / "nodes"
    file.write_text("jwb0001\n" * 50_000)
    assert read(str(file)) == file.read_text()


@pytest.mark.parametrize(
    "path", [procfs.BOOT_ID, "/proc/sys/net/ipv4/ip_local_port_range"]
)
def test_a_setting_of_the_kernel(path):
    assert read(path) == Path(path).read_text()


def test_this_process():
    me = os.getpid()
    status = procfs.status(me)
    assert (status["Pid"], status["PPid"]) == (str(me), str(os.getppid()))
    assert procfs.ancestors(me)[1][:2] == (me, os.getppid())
    assert 0 < procfs.age(me) < procfs.age(os.getppid())
    assert procfs.threads() == procfs.threads(me)
    assert me in procfs.threads()
    assert procfs.status(me, me)["Name"] == status["Name"]


def test_a_thread_of_this_process():
    ends = threading.Event()
    thread = threading.Thread(target=ends.wait)
    thread.start()
    assert thread.native_id in procfs.threads()
    assert procfs.status(os.getpid(), thread.native_id)["Pid"] == str(thread.native_id)
    ends.set()
    thread.join()
    until(lambda: thread.native_id not in procfs.threads())


def test_a_process_that_is_gone():
    gone = 2**22 + 1  # more than any process has: PID_MAX_LIMIT
    assert procfs.status(gone) == {}
    assert procfs.age(gone) == 0.0
    assert procfs.threads(gone) == []
    assert procfs.ancestors(gone) == ((), (gone,))


def test_open_files(tmp_path):
    before = procfs.open_files()
    with (tmp_path / "file").open("w") as file:
        assert procfs.open_files() - before == {file.fileno()}
        assert procfs.target(file.fileno()) == str(tmp_path / "file")
        number = file.fileno()
    assert procfs.open_files() == before
    assert procfs.target(number) == ""
