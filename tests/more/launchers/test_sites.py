"""Computing centres other than Jülich, and a site in a file; see core/test_sites.py."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import pytest
from commands import (
    ENVIRON,
    HPC,
    ONE_TASK,
    WORLD,
    column,
    lines,
    read_workers,
)
from sites_of_tests import OWN, VARIABLES
from testbed import Cluster

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.usefixtures("machine")


class Centre(NamedTuple):
    """A cluster that looks like a centre's, and what is to come out."""

    cluster: Cluster
    environ: dict[str, str]
    site: str
    nccl: str
    head: str


@pytest.mark.parametrize(
    "centre",
    [
        Centre(
            # The plain name is that of the fast network.
            Cluster(("dec0001", "deg0001"), fast="hsn0", fast_names=str),
            {"NCAR_HOST": "derecho"},
            "derecho",
            "hsn",
            "dec0001",
        ),
        Centre(
            Cluster(
                ("x3001c0s1b0n0", "x3102c0s13b0n0"),
                fast="hsn0",
                fast_names="{}.hsn.cm.polaris.alcf.anl.gov".format,
            ),
            # A PBS_JOBID by which it is known would be left over in a job of Slurm.
            {"PET_HPC_SITE": "polaris"},
            "polaris",
            "=hsn0",
            "x3001c0s1b0n0.hsn.cm.polaris.alcf.anl.gov",
        ),
    ],
    ids=lambda centre: centre.site,
)
def test_centre(centre: Centre) -> None:
    environ = ENVIRON | centre.environ
    with centre.cluster as cluster:
        foreign = cluster.foreign_bytes("eth0")
        done = cluster.srun("-N2", ONE_TASK, *HPC, WORLD, env=environ)
        assert cluster.foreign_bytes("eth0") == foreign
        here = cluster.srun(
            "-N1", "python", "-m", "torchrun_hpc.sites", "here", env=environ
        )
    assert done.returncode == 0, done.stderr
    (line,) = lines(done.stderr)
    assert f"scheduler rendezvous at {centre.head}:" in line
    assert line.endswith(f", site {centre.site}")
    interface = centre.cluster.fast
    assert column(read_workers(done), *VARIABLES) == [
        (host, "10.20.0.1", interface, centre.nccl) for host in centre.cluster.names
    ], done.stdout
    assert here.returncode == 0, here.stderr
    assert centre.site in here.stdout


def test_a_site_of_a_file(tmp_path: Path) -> None:
    """Typed, its variables reach the workers, and what is set is kept."""
    file = tmp_path / "site.toml"
    file.write_text(OWN, encoding="utf-8")
    names = ("NCCL_CROSS_NIC", "NCCL_SOCKET_IFNAME")
    option = f"--hpc-site={file}"
    with Cluster(
        ("node9", "node10"), fast="enp5s0", fast_names="{}-fast".format
    ) as cluster:
        step = ("-N2", "--ntasks-per-node=2", *HPC, option, WORLD)
        done = cluster.srun(*step, env=ENVIRON)
        assert column(read_workers(done), *names) == [("1", "enp")] * 4, done.stderr
        kept = ENVIRON | {"NCCL_CROSS_NIC": "2", "NCCL_SOCKET_IFNAME": "=enp5s0"}
        done = cluster.srun(*step, env=kept)
        assert column(read_workers(done), *names) == [("2", "=enp5s0")] * 4, done.stderr
        file.write_text(OWN.replace("enp", ""), encoding="utf-8")
        done = cluster.srun("-N2", ONE_TASK, *HPC, option, WORLD, env=ENVIRON)
    assert done.returncode == 2
    # It may be another file on the other node: each speaks for itself.
    found = [line for line in lines(done.stderr) if "hpc: error" in line]
    assert len(found) == 2, done.stderr
    for line in found:
        assert f"{file}, line 15" in line
        assert "NCCL_SOCKET_IFNAME" in line
