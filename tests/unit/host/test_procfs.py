"""What is read of this process, and of files."""

from __future__ import annotations

import os

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
