"""One node of two cannot start: it says so, and both end before their time is up."""

from __future__ import annotations

from typing import NamedTuple

import pytest

from tests.support.cluster.commands import HOSTS, SCRIPTS, errors, on_node, refused
from tests.support.cluster.real_job import launch
from tests.support.patience import NEVER_S

NO_TORCH = "export PYTHONPATH={folder}"
NOT_IMPORTED = "torch cannot be imported by"


class Fault(NamedTuple):
    """A fault on one node.

    Attributes:
        node: The node.
        first: What its shell runs before the command, which is ``"$@"``.
        says: What the node says after its name.
        options: The options on all nodes.
    """

    node: int
    first: str
    says: str
    options: tuple[str, ...] = ()


FAULTS = {
    "no torch": Fault(1, NO_TORCH, NOT_IMPORTED),
    "no torch on the head": Fault(0, NO_TORCH, NOT_IMPORTED),
    "no torch, and an endpoint": Fault(
        0, NO_TORCH, NOT_IMPORTED, ("--rdzv-endpoint=n10:24322",)
    ),
    "no torch on the head, in a dry run of c10d": Fault(
        0, NO_TORCH, NOT_IMPORTED, ("--hpc-rendezvous=c10d", "--hpc-dry-run")
    ),
    "no interface": Fault(
        1, "export GLOO_SOCKET_IFNAME=ib7", "GLOO_SOCKET_IFNAME=ib7: this node has no"
    ),
    "all ports taken": Fault(
        0,
        f'set -- python {SCRIPTS / "hold_ports.py"} "$@"',
        "cannot listen on 10.10.0.1: port ",
    ),
    "an option that only this torch lacks": Fault(
        1, 'shift 3; set -- python -m torchrun_hpc --nope "$@"', "unknown option --nope"
    ),
    "a log folder that cannot be made": Fault(
        1, "export PET_LOG_DIR=/proc/none", "torchrun cannot create its log folder"
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_all_end_and_hear_why(unpadded, tmp_path, name):
    """The other node would wait for `NEVER_S`."""
    node, first, says, options = FAULTS[name]
    (tmp_path / "torch.py").write_text("raise OSError('libcudart.so.13: no such file')")
    done = launch(
        unpadded,
        f"--rdzv-conf=join_timeout={NEVER_S}",
        *options,
        srun=["--label"],
        first=on_node(node, first.format(folder=tmp_path)),
    )
    refused(done)
    (own,) = [x for x in errors(done.stderr) if x.startswith(f"{node}: ")]
    assert f" on {HOSTS[node]}: {says}" in own
    if node != 0:
        (last,) = [x for x in errors(done.stderr) if x.startswith("0: ")] or [""]
        assert f"the job has failed: the agent on {HOSTS[node]} (node {node})" in last
        assert says in last
