"""A worker: what it writes, when it ends, and with whom it runs what."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys

import pytest
import torch
from torch_workers import ENVIRON, settings_of
from waiting import PATIENCE

from torchrun_hpc import wire
from torchrun_hpc.doctor import collectives
from torchrun_hpc.doctor.results import Collective, Finding, Torch
from torchrun_hpc.torch_compat import capabilities
from torchrun_hpc.torch_compat.patches import registry

PROGRAM = (sys.executable, "-m", "torchrun_hpc.doctor.collectives")


def started(folder=None):
    """Start a worker, in front of whose modules there is a folder."""
    return subprocess.Popen(
        PROGRAM,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**ENVIRON, "PYTHONPATH": str(folder or "")},
    )


@pytest.fixture
def shadow(tmp_path):
    """Write a torch that is found first; return its folder."""

    def write(text):
        package = tmp_path / "torch"
        package.mkdir()
        (package / "__init__.py").write_text(text)
        return tmp_path

    return write


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (
            "raise ImportError('libcudart.so.13: cannot open\\nshared object')",
            "ImportError: libcudart.so.13: cannot open shared object",
        ),
        ("raise SystemExit(3)", "SystemExit: 3"),
        ("version = None", "AttributeError: "),
    ],
)
def test_a_torch_that_cannot_be_imported(shadow, text, problem):
    with started(shadow(text)) as worker:  # its stdin is open to its end
        found = json.loads(worker.stdout.read())
        errors = worker.stderr.read().decode()
    wire.decode(Torch, found)
    assert found["problem"].startswith(problem)
    assert not found["version"]
    assert "Traceback " in errors
    assert worker.returncode == 1


TORCH = """\
import os
from types import SimpleNamespace

print("to stdout")
os.system("echo of a program")
__version__ = "9.9"
version = SimpleNamespace(cuda="13.0", hip=None)
cuda = SimpleNamespace(
    device_count=lambda: 4,
    is_available=lambda: True,
    nccl=SimpleNamespace(version=lambda: (2, 30, 7)),
)
backends = SimpleNamespace(cudnn=SimpleNamespace(version=lambda: 92600))
"""


def test_what_it_prints_goes_to_stderr(shadow):
    with started(shadow(TORCH)) as worker:
        found = json.loads(worker.stdout.readline())
        worker.stdin.close()
        errors = worker.stderr.read()
    wire.decode(Torch, found)
    assert found["version"] == "9.9"
    assert found["libraries"] == {"cuda": "13.0", "nccl": "2.30.7", "cudnn": "92600"}
    assert found["gpus"] == 4
    assert sorted(errors.splitlines()) == [b"of a program", b"to stdout"]


def test_a_torch_that_has_changed_what_is_patched(monkeypatch):
    patch = registry.PATCHES[0]
    lost = capabilities.Capability(f"=={capabilities.RELEASE}", present=False)
    monkeypatch.setattr(patch, "IS_FOR", lost)
    (finding,) = collectives._findings()
    wire.decode(Finding, finding)
    assert (finding["code"], finding["is_suspect"]) == ("HPC080", False)
    assert patch.TARGET in finding["text"]


@pytest.mark.parametrize("text", ["import time; time.sleep(600)", TORCH])
def test_it_ends_with_its_parent(shadow, text):
    """Whose end of the pipe is closed: in the import of torch, and behind it."""
    with started(shadow(text)) as worker:
        if text == TORCH:
            assert worker.stdout.readline()
        worker.stdin.close()
        worker.wait(PATIENCE)


@pytest.mark.parametrize(
    ("backend", "nodes", "local_size", "found"),
    [
        ("gloo", 2, 4, [("all", "", 5, 8)]),
        ("nccl", 2, 4, [("all", "", 5, 8), ("node 1", "n1", 1, 4)]),
        ("nccl", 8, 1, [("all", "", 5, 8)]),
        ("nccl", 1, 8, [("all", "", 5, 8)]),
    ],
)
def test_who_runs_them(backend, nodes, local_size, found):
    settings = settings_of(nodes, local_size)[5]
    assert collectives._groups(settings, backend) == found


def run_forks(all_settings, gpus):
    """Run workers that are forks, so that torch is imported once; return rows of each.

    Args:
        all_settings: Those of each.
        gpus: How many GPUs each believes that it has.
    """
    running = []
    for settings, own_gpus in zip(all_settings, gpus, strict=True):
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            signal.alarm(PATIENCE)
            torch.cuda.is_available = lambda: True
            torch.cuda.device_count = lambda gpus=own_gpus: gpus
            rows = []
            rows.append(collectives._run(settings, rows.append))
            os.write(writer, json.dumps(rows).encode())
            os._exit(0)
        os.close(writer)
        running.append((pid, io.FileIO(reader)))
    found = []
    for pid, output in running:
        with output:
            found.append(json.loads(output.read() or "[]"))
        os.waitpid(pid, 0)
    return found


def test_groups_of_nodes(monkeypatch):
    """Which only GPUs have; not all workers have one."""
    decide = collectives._groups

    def decide_as_with_gpus(settings, backend):
        assert backend == "gloo"
        return decide(settings, "nccl")

    monkeypatch.setattr(collectives, "_groups", decide_as_with_gpus)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    all_rows = run_forks(settings_of(2, 2, max_bytes=32), gpus=(2, 2, 0, 0))
    assert [rows.pop() for rows in all_rows] == ["gloo"] * 4
    seen = [{row["scope"] for row in rows} for rows in all_rows]
    assert seen == [{"", "n0"}, set(), {"n1"}, set()]
    for row in [row for rows in all_rows for row in rows]:
        wire.decode(Collective, row)
        assert row["wrong"] == 0
    sizes = [
        [row["size"] for row in rows if row["operation"] == "all_gather"]
        for rows in all_rows
    ]
    assert sizes == [[16, 32, 8, 32], [], [8, 32], []]
