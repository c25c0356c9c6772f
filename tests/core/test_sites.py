"""A site of the user's own, on a cluster with names and interfaces of its own."""

from __future__ import annotations

import pytest

from tests.support.cluster.commands import ENVIRON, column, lines
from tests.support.cluster.real_job import launch
from tests.support.cluster.testbed import Cluster
from tests.support.own_site import OWN, VARIABLES

pytestmark = pytest.mark.usefixtures("machine")


def test_a_site_in_the_users_folder(tmp_path):
    """A variable shows it; names, interfaces and variables of the workers are its.

    The nodes' profile is not executed; what is skipped of it is reported.
    """
    folder = tmp_path / "torchrun_hpc" / "sites"
    folder.mkdir(parents=True)
    profile, touched = tmp_path / "nccl.sh", tmp_path / "touched"
    profile.write_text(
        "export NCCL_CROSS_NIC=2\nNCCL_PROTO=LL\n"
        f"NCCL_ALGO=$(touch {touched})\ntouch {touched}\n",
        encoding="utf-8",
    )
    names = '["NCCL_CROSS_NIC", "NCCL_PROTO", "NCCL_ALGO"]'
    text = f"{OWN}\n[ours.profile]\nfile = '{profile}'\nnames = {names}\n"
    (folder / "ours.toml").write_text(text, encoding="utf-8")
    environ = {"OUR_CLUSTER": "cellar", "XDG_CONFIG_HOME": str(tmp_path)}
    with Cluster(
        ("node9", "node10"), fast="enp5s0", fast_names="{}-fast".format
    ) as cluster:
        foreign = cluster.foreign_bytes("eth0")
        done = launch(cluster, environ=environ)
        assert cluster.foreign_bytes("eth0") == foreign
        asks = ("python", "-m", "torchrun_hpc.sites", "here")
        here = cluster.run(asks, host="node9", env=ENVIRON | environ)
    assert column(done, *VARIABLES, "NCCL_CROSS_NIC", "NCCL_PROTO", "NCCL_ALGO") == [
        (host, "10.20.0.1", "enp5s0", "enp", "2", "LL", "")
        for host in ("node9", "node10")
    ]
    assert not touched.exists()
    line, warning = lines(done.stderr)
    skipped = (
        f"{profile}: not taken: NCCL_ALGO (line 3, only a shell can tell its value)"
    )
    assert f"warning[HPC248]: {skipped}. Export" in warning
    assert "meeting at node9-fast:" in line
    assert line.endswith("; site ours")
    assert here.returncode == 0, here.stderr
    assert "a cluster in a cellar" in here.stdout
