"""The health check of a node: real commands."""

from __future__ import annotations

import os

import psutil
import pytest

from tests.support.patience import NEVER_S, until
from torchrun_hpc.rendezvous.handler import check_health

WITH_CODE = "its health check ended with exit code"


def result(command, limit=NEVER_S):
    """Run a health check as a node does; return why the node is not well."""
    return check_health(command, limit, lambda: None)


def test_a_node_that_is_well():
    for command in (
        *("true", "exit 0", "echo all is well", "echo odd >&2", "false || true"),
        "! read line",  # there is no input
    ):
        assert result(command) == "", command


# What it does, and why the node is not well.
FAILS = {
    "it says nothing": ("exit 3", f"{WITH_CODE} 3"),
    "it says why": ("echo bad GPU; exit 1", f"{WITH_CODE} 1: bad GPU"),
    "on standard error": ("echo bad GPU >&2; exit 1", f"{WITH_CODE} 1: bad GPU"),
    "the last line counts": (
        "echo first; echo '  second '; echo; echo '   '; exit 1",
        f"{WITH_CODE} 1: second",
    ),
    "both outputs are one": (
        "echo first >&2; echo second; exit 1",
        f"{WITH_CODE} 1: second",
    ),
    "a line without end": ("printf bad; exit 1", f"{WITH_CODE} 1: bad"),
    "there is no such command": (
        "exec 2>/dev/null; no-such-command",
        f"{WITH_CODE} 127",
    ),
    "it is killed": (
        "kill -15 $$",
        "its health check was killed by SIGTERM (15)",
    ),
    "a long line": (
        "printf '%0500d' 0; exit 1",
        f"{WITH_CODE} 1: {150 * '0'}",
    ),
    "what a terminal would act on": (
        r"printf 'a\033[2Jb\n'; exit 1",
        f"{WITH_CODE} 1: a [2Jb",
    ),
    "more output than a pipe holds": (
        "head -c 300000 /dev/zero | tr '\\0' x; echo; echo bad; exit 1",
        f"{WITH_CODE} 1: bad",
    ),
    "more output than there is memory": (
        "dd bs=1 count=0 seek=1T; echo; echo bad; exit 1",
        f"{WITH_CODE} 1: bad",
    ),
    "what is no text": (r"printf '\377bad\n'; exit 1", f"{WITH_CODE} 1: \\xffbad"),
}


def test_a_node_that_is_not_well():
    for case, (command, expected) in FAILS.items():
        assert result(command) == expected, case


@pytest.fixture
def hangs(tmp_path):
    """Run a health check that begins so, and hangs; return what is said of it."""

    def run(command):
        begun = tmp_path / "begun"
        hanging = f"{command} echo > {begun}; sleep 999; sleep 999"
        found = check_health(hanging, NEVER_S, begun.exists)
        begun.unlink()
        return found

    return run


def test_one_that_hangs(hangs):
    late = f"its health check did not end within {NEVER_S} s"
    assert hangs("") == late
    assert hangs("echo asking GPU 3;") == f"{late}: asking GPU 3"
    assert hangs("trap '' TERM INT HUP;") == late


def test_one_that_hangs_is_killed_with_its_children(tmp_path, hangs):
    file = tmp_path / "pids"
    assert "did not end" in hangs(f"sleep 999 & echo $! $$ > {file};")
    pids = [int(pid) for pid in file.read_text().split()]
    until(lambda: not any(map(runs, pids)))


def runs(pid):
    """Return whether a process runs; an ended one may still have its number."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_one_without_time():
    late = "its health check did not end within 0.1 s"
    assert result("sleep 999", limit=0.1) == late


def test_it_has_the_environment_of_the_launcher(monkeypatch, tmp_path):
    monkeypatch.setenv("SLURM_NODEID", "1")
    monkeypatch.chdir(tmp_path)
    found = result('echo "$SLURM_NODEID $PWD"; exit 1')
    assert found == f"{WITH_CODE} 1: 1 {os.path.realpath(tmp_path)}"
