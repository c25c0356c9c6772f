from __future__ import annotations

import io
from pathlib import Path

import pytest

from torchrun_hpc import report
from torchrun_hpc.endpoints import port_of
from torchrun_hpc.inputs import Value
from torchrun_hpc.plan import LaunchPlan

HEAD = "3 nodes x 4 workers, Slurm 19.0, rendezvous at"
IB0 = {"GLOO_SOCKET_IFNAME": Value("ib0", "ib0 has 10.20.0.1")}


def plan(**changes):
    settings = {
        "title": "Slurm 19.0",
        "nodes": 3,
        "node_rank": 0,
        "workers": 4,
        "speaks": True,
        "endpoint": "jwb0001i:25592",
    }
    return LaunchPlan(**settings | changes)


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        (
            {"listen": ("10.20.0.1", 25592), "environment": IB0},
            f"{HEAD} jwb0001i:25592 (10.20.0.1), interface ib0",
        ),
        (
            {},
            f"{HEAD} jwb0001i:25592",
        ),
        (
            {"endpoint": "10.20.0.1:29400", "listen": ("10.20.0.1", 29400)},
            f"{HEAD} 10.20.0.1:29400",
        ),
        (
            {"endpoint": "[fd00::1]:29400", "listen": ("fd00::1", 29400)},
            f"{HEAD} [fd00::1]:29400",
        ),
        (
            {"nodes": 1, "workers": 1, "endpoint": "localhost"},
            "1 node x 1 worker, Slurm 19.0, rendezvous at localhost",
        ),
        (
            {"nodes": 2, "endpoint": "", "title": "no scheduler"},
            "2 nodes x 4 workers, no scheduler",
        ),
        (
            {"notes": ("jwb0001 rewritten to jwb0001i", "and this")},
            f"{HEAD} jwb0001i:25592; jwb0001 rewritten to jwb0001i; and this",
        ),
    ],
)
def test_start_line(changes, line):
    assert report.start_line(plan(**changes)) == line


def test_line_is_one_write():
    writes = []

    class Stream(io.StringIO):
        def write(self, text):
            writes.append(text)
            return super().write(text)

    report.line("error: text", Stream())
    assert writes == ["torchrun_hpc: error: text\n"]


def test_readme_shows_the_line_that_is_printed():
    """The port in it is the one of job 123456."""
    readme = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    port = port_of("123456.0")
    shown = plan(
        title="Slurm 123456.0",
        nodes=4,
        endpoint=f"jwb0001i:{port}",
        listen=("10.20.0.1", port),
        environment=IB0,
        notes=(),
    )
    assert f"    torchrun_hpc: {report.start_line(shown)}\n" in readme
