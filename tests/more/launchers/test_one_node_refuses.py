"""One node of two cannot start: it says so, and both end before their time is up."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import pytest
from commands import ENVIRON, FIRST_TWO, HPC, ONE_TASK, SCRIPTS, WORLD, own_lines
from waiting import NEVER_S

if TYPE_CHECKING:
    from pathlib import Path

    from testbed import Cluster

NO_TORCH = "export PYTHONPATH={folder}"
PORTS = f'set -- python {SCRIPTS / "hold_ports.py"} "$@"'


class Fault(NamedTuple):
    """What is wrong on one node.

    Attributes:
        node: Which.
        first: What its shell does before it starts the command, which is ``"$@"``.
        says: What the node says, behind its name.
        options: What is typed, on all nodes.
    """

    node: int
    first: str
    says: str
    options: tuple[str, ...] = ()


FAULTS = {
    "no torch": Fault(1, NO_TORCH, "torch cannot be imported by"),
    "no torch on the head": Fault(0, NO_TORCH, "torch cannot be imported by"),
    "no torch, and an endpoint": Fault(
        0, NO_TORCH, "torch cannot be imported by", ("--rdzv-endpoint", "n10:24322")
    ),
    "no interface": Fault(
        1, "export GLOO_SOCKET_IFNAME=ib7", "GLOO_SOCKET_IFNAME=ib7: this node has no"
    ),
    "all ports taken": Fault(0, PORTS, "cannot listen on 10.10.0.1: port "),
    "an option that only this torch lacks": Fault(
        1, 'shift 3; set -- python -m torchrun_hpc --nope "$@"', "unrecognized arg"
    ),
    "a log folder that cannot be made": Fault(
        1, "export PET_LOG_DIR=/proc/none", "torchrun cannot make its folder for logs"
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_all_end_and_hear_why(unpadded: Cluster, tmp_path: Path, name: str) -> None:
    """The other node would wait for `NEVER_S`."""
    fault = FAULTS[name]
    (tmp_path / "torch.py").write_text("raise OSError('libcudart.so.13: no such file')")
    first = fault.first.format(folder=tmp_path)
    shell = f'if test $SLURM_NODEID = {fault.node}; then {first}; fi; "$@"'
    done = unpadded.srun(
        *FIRST_TWO, ONE_TASK, "--label", "sh", "-c", shell, "sh", *HPC,
        f"--rdzv-conf=join_timeout={NEVER_S}", *fault.options, WORLD, env=ENVIRON,
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    host = ("n9", "n10")[fault.node]
    errors = [line for line in own_lines(done.stderr) if "error: " in line]
    (own,) = [line for line in errors if line.startswith(f"{fault.node}: ")]
    assert f" on {host}: {fault.says}" in own
    if fault.node != 0:
        (last,) = [line for line in errors if line.startswith("0: ")] or [done.stderr]
        assert f"the job has failed: the agent on {host} (node {fault.node})" in last
        assert fault.says in last
