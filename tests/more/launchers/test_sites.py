"""Computing centres other than Jülich, and a site in a file; see core/test_sites.py."""

from __future__ import annotations

import pytest

from tests.support.cluster.commands import ENVIRON, column, lines
from tests.support.cluster.real_job import launch
from tests.support.cluster.testbed import Cluster
from tests.support.own_site import OWN, VARIABLES

pytestmark = pytest.mark.usefixtures("machine")

# A cluster that looks like the centre's, what shows the site, the variable for NCCL,
# and the head node's name.
CENTRES = {
    "derecho": (  # the plain name is that of the fast network
        Cluster(("dec0001", "deg0001"), fast="hsn0", fast_names=str),
        {"NCAR_HOST": "derecho"},
        *("hsn", "dec0001"),
    ),
    "polaris": (
        Cluster(
            ("x3001c0s1b0n0", "x3102c0s13b0n0"),
            fast="hsn0",
            fast_names="{}.hsn.cm.polaris.alcf.anl.gov".format,
        ),
        # A PBS_JOBID by which it is known would be left over in a job of Slurm.
        {"PET_HPC_SITE": "polaris"},
        *("=hsn0", "x3001c0s1b0n0.hsn.cm.polaris.alcf.anl.gov"),
    ),
}


@pytest.mark.parametrize("site", CENTRES)
def test_centre(site):
    centre, environ, nccl, head = CENTRES[site]
    with centre as cluster:
        foreign = cluster.foreign_bytes("eth0")
        done = launch(cluster, environ=environ)
        assert cluster.foreign_bytes("eth0") == foreign
        here = cluster.srun(
            "-N1", "python", "-m", "torchrun_hpc.sites", "here", env=ENVIRON | environ
        )
    assert column(done, *VARIABLES) == [
        (host, "10.20.0.1", "hsn0", nccl) for host in cluster.names
    ]
    (line,) = lines(done.stderr)
    assert f"meeting at {head}:" in line
    assert line.endswith(f"; site {site}")
    assert here.returncode == 0, here.stderr
    assert site in here.stdout


def test_a_site_of_a_file(tmp_path):
    """Its variables reach the workers; variables that the user set are kept."""
    file = tmp_path / "site.toml"
    file.write_text(OWN, encoding="utf-8")
    names = ("NCCL_CROSS_NIC", "NCCL_SOCKET_IFNAME")
    option = f"--hpc-site={file}"
    with Cluster(
        ("node9", "node10"), fast="enp5s0", fast_names="{}-fast".format
    ) as cluster:
        done = launch(cluster, option, tasks=2)
        assert column(done, *names) == [("1", "enp")] * 4
        kept = {"NCCL_CROSS_NIC": "2", "NCCL_SOCKET_IFNAME": "=enp5s0"}
        done = launch(cluster, option, tasks=2, environ=kept)
        assert column(done, *names) == [("2", "=enp5s0")] * 4
        file.write_text(OWN.replace("enp", ""), encoding="utf-8")
        done = launch(cluster, option)
    assert done.returncode == 2
    # It may be another file on the other node: each speaks for itself.
    found = [line for line in lines(done.stderr) if "hpc: error" in line]
    assert len(found) == 2
    for line in found:
        assert f"{file}, ours.variables" in line
        assert "NCCL_SOCKET_IFNAME" in line
