from __future__ import annotations

import io
import sys

import pytest

from torchrun_hpc.errors import Message, to_copy
from torchrun_hpc.reporting import console


@pytest.mark.parametrize(
    ("kind", "details", "text"),
    [
        ("error", (), "torchrun_hpc: error[HPC061]: text\n"),
        ("warning", (), "torchrun_hpc: warning[HPC061]: text\n"),
        ("note", (), "torchrun_hpc: note[HPC061]: text\n"),
        ("error", ("  a", "b"), "torchrun_hpc: error[HPC061]: text\n  a\nb\n"),
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


def test_a_message_about_one_node(capsys):
    console.write(Message("HPC061", "text"), "error", host="n9")
    assert capsys.readouterr().err == "torchrun_hpc: error[HPC061]: on n9: text\n"


def test_a_listener_gets_the_messages_instead(monkeypatch, capsys):
    heard = []
    listeners = [lambda message, kind: heard.append((message, kind))]
    monkeypatch.setattr(console, "listeners", listeners)
    message = Message("HPC061", "text")
    console.write(message, "error", host="n9")
    console.write_text("torchrun_hpc: 2 nodes")
    assert (heard, capsys.readouterr().err) == ([(message, "error")], "")


def test_a_listener_that_cannot_write_raises_nothing(monkeypatch, capsys):
    def listener(_message, _kind):
        raise BrokenPipeError

    monkeypatch.setattr(console, "listeners", [listener])
    console.write(Message("HPC061", "text"))
    assert not capsys.readouterr().err


def test_the_line_to_copy_is_on_its_own(capsys):
    message = Message("HPC061", f"Start with srun:{to_copy('srun -N2 a b')}")
    console.write(message, "error")
    written = "torchrun_hpc: error[HPC061]: Start with srun:\n    srun -N2 a b\n"
    assert capsys.readouterr().err == written
    assert str(message) == "HPC061 Start with srun: srun -N2 a b"


def test_no_message_acts_on_a_terminal(capsys):
    """Whoever has sent parts of it: another node, or who claims to be one."""
    text = "no sign of größe\x1b]0;title\x07 for \n3 s" + "x" * 2**17
    console.write(Message("HPC121", text), details=("\tb\x1b[2J",))
    line, detail = capsys.readouterr().err.splitlines()
    assert line.startswith(
        "torchrun_hpc: note[HPC121]: no sign of größe ]0;title  for  3 sx"
    )
    assert len(line) == 2**16
    assert detail == " b [2J"
