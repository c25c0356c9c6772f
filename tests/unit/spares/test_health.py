"""The health check of a node: real commands."""

from __future__ import annotations

import os
import time

import psutil
import pytest

from torchrun_hpc.spares.health import HealthCheck

LIMIT = 10.0  # seconds that anything may take here
WITH_CODE = "its health check ended with exit code"


def result(command, limit=LIMIT):
    """Run a health check as a node does; return why the node is not well."""
    check = HealthCheck(command, limit)
    while not check.has_ended:
        time.sleep(0.005)
    return check.end()


@pytest.mark.parametrize(
    "command", ["true", "exit 0", "echo all is well", "echo odd >&2", "false || true"]
)
def test_a_node_that_is_well(command):
    assert result(command) == ""


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
    "what is no text": (r"printf '\377bad\n'; exit 1", f"{WITH_CODE} 1: \\xffbad"),
}


@pytest.mark.parametrize("case", FAILS)
def test_a_node_that_is_not_well(case):
    command, expected = FAILS[case]
    assert result(command) == expected


@pytest.mark.parametrize(
    ("before", "expected"), [("", ""), ("echo asking GPU 3; ", ": asking GPU 3")]
)
def test_one_that_hangs(before, expected):
    found = result(f"{before}sleep 60", 0.2)
    assert found == f"its health check did not end within 0.2 s{expected}"


def test_one_that_ignores_signals():
    assert "did not end" in result("trap '' TERM INT HUP; sleep 60; sleep 60", 0.2)


def test_one_that_hangs_is_killed_with_its_children(tmp_path):
    file = tmp_path / "pids"
    command = f"sleep 60 & echo $! $$ > {file}; wait"
    assert "did not end" in result(command, 0.5)
    pids = [int(pid) for pid in file.read_text().split()]
    end = time.monotonic() + LIMIT
    while any(map(runs, pids)):
        assert time.monotonic() < end
        time.sleep(0.01)


def runs(pid):
    """Say whether a process runs; one that has ended may still have its number."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_one_that_is_not_needed_any_more():
    check = HealthCheck("sleep 60", LIMIT)
    assert not check.has_ended
    assert check.end().startswith("its health check did not end")


def test_it_reads_no_input():
    assert result("read line && exit 1; true") == ""


def test_more_output_than_a_pipe_holds():
    command = "head -c 300000 /dev/zero | tr '\\0' x; echo; echo bad; exit 1"
    assert result(command) == f"{WITH_CODE} 1: bad"


def test_it_has_the_environment_of_the_launcher(monkeypatch, tmp_path):
    monkeypatch.setenv("SLURM_NODEID", "1")
    monkeypatch.chdir(tmp_path)
    found = result('echo "$SLURM_NODEID $PWD"; exit 1')
    assert found == f"{WITH_CODE} 1: 1 {os.path.realpath(tmp_path)}"
