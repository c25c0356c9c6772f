from __future__ import annotations

import io
import sys

import pytest

from torchrun_hpc.errors import Message
from torchrun_hpc.reporting import console


@pytest.mark.parametrize(
    ("kind", "details", "text"),
    [
        ("error", (), "torchrun_hpc: error: HPC061 text\n"),
        ("warning", (), "torchrun_hpc: warning: HPC061 text\n"),
        ("", (), "torchrun_hpc: HPC061 text\n"),
        ("error", ("  a", "b"), "torchrun_hpc: error: HPC061 text\n  a\nb\n"),
    ],
)
def test_all_of_it_is_one_write(monkeypatch, kind, details, text):
    writes = []

    class Stream(io.StringIO):
        def write(self, text):
            writes.append(text)
            return super().write(text)

    monkeypatch.setattr(sys, "stderr", Stream())
    console.write(Message("HPC061", "text"), kind, details)
    assert writes == [text]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("größe", "größe"),
        ("a\nb\x1b[2J", "a b [2J"),
        ("", ""),
        ("abcdefghij", "abcdefgh"),
    ],
)
def test_what_a_terminal_would_act_on(text, shown):
    assert console.printable(text, 8) == shown
