"""One node of two cannot start: it says so, and both end before their time is up."""

from __future__ import annotations

import pytest

from tests.support.cluster.commands import HOSTS, SCRIPTS, errors, launch, refused
from tests.support.patience import NEVER_S

NO_TORCH = "export PYTHONPATH={folder}"
NOT_IMPORTED = "torch cannot be imported by"

# The node, what its shell does before it starts the command, which is "$@", what the
# node says, behind its name, and what is typed on all nodes.
FAULTS = {
    "no torch": (1, NO_TORCH, NOT_IMPORTED),
    "no torch on the head": (0, NO_TORCH, NOT_IMPORTED),
    "no torch, and an endpoint": (
        *(0, NO_TORCH, NOT_IMPORTED),
        "--rdzv-endpoint=n10:24322",
    ),
    "no torch on the head, in a dry run of c10d": (
        *(0, NO_TORCH, NOT_IMPORTED),
        *("--hpc-rendezvous=c10d", "--hpc-dry-run"),
    ),
    "no interface": (
        1, "export GLOO_SOCKET_IFNAME=ib7", "GLOO_SOCKET_IFNAME=ib7: this node has no"
    ),
    "all ports taken": (
        0, f'set -- python {SCRIPTS / "hold_ports.py"} "$@"',
        "cannot listen on 10.10.0.1: port ",
    ),
    "an option that only this torch lacks": (
        1, 'shift 3; set -- python -m torchrun_hpc --nope "$@"', "unknown option --nope"
    ),
    "a log folder that cannot be made": (
        1, "export PET_LOG_DIR=/proc/none", "torchrun cannot create its log folder"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_all_end_and_hear_why(unpadded, tmp_path, name):
    """The other node would wait for `NEVER_S`."""
    node, does, says, *options = FAULTS[name]
    first = f"if test $SLURM_NODEID = {node}; then {does.format(folder=tmp_path)}; fi"
    (tmp_path / "torch.py").write_text("raise OSError('libcudart.so.13: no such file')")
    done = launch(
        unpadded,
        f"--rdzv-conf=join_timeout={NEVER_S}",
        *options,
        srun=["--label"],
        first=first,
    )
    refused(done)
    (own,) = [x for x in errors(done.stderr) if x.startswith(f"{node}: ")]
    assert f" on {HOSTS[node]}: {says}" in own
    if node != 0:
        (last,) = [x for x in errors(done.stderr) if x.startswith("0: ")] or [""]
        assert f"the job has failed: the agent on {HOSTS[node]} (node {node})" in last
        assert says in last
