"""Lists of hosts, and the job of a script."""

from __future__ import annotations

import pytest

from torchrun_hpc.errors import LaunchError
from torchrun_hpc.schedulers.detector import Allocation, hosts_in
from torchrun_hpc.schedulers.job import LaunchContext, Task, as_identifier
from torchrun_hpc.schedulers.openmpi import MPIRUN
from torchrun_hpc.schedulers.slurm import SRUN

PROVENANCE = {"nodes": "NODES", "launch_id": "JOB"}


def test_hosts_in():
    lines = ["n2", "", "# a comment", " n1.site  # another", "n2"]
    assert hosts_in(lines, "FILE") == ["n2", "n1.site", "n2"]
    assert hosts_in(["n2 4", "n1"], "FILE", counts=True) == ["n2", "n1"]


@pytest.mark.parametrize(
    ("line", "counts"),
    [("n1 4", False), ("n1 4 4", True), ("n1 x", True), ("n 1", False), ("-n", False)],
)
def test_an_entry_that_is_no_host(line, counts):
    with pytest.raises(LaunchError, match=f"^FILE .* entry 2 is '{line}'") as caught:
        hosts_in(["n1", line], "FILE", counts=counts)
    assert caught.value.code == "HPC140"


def test_as_identifier():
    assert as_identifier("17[3].a_b-\u0661") == "17-3-.a_b--"


@pytest.mark.parametrize(
    ("nodes", "hostname", "context", "rank"),
    [
        (("n1", "n2"), "n2.site", LaunchContext.BATCH_SCRIPT, 1),
        (("n1", "n2"), "login", LaunchContext.ALLOCATION_SHELL, None),
        (("n1",), "login", LaunchContext.BATCH_SCRIPT, None),
    ],
)
def test_job_of_script(nodes, hostname, context, rank):
    allocation = Allocation("PBS", "7", nodes, PROVENANCE, host_file="$FILE")
    job = allocation.job_of_script(hostname, MPIRUN)
    assert (job.context, job.node_rank, job.nodes) == (context, rank, nodes)
    assert (job.task, job.allocated_nodes) == (Task(), len(nodes))
    assert job.host_file == "$FILE"
    assert allocation.job_of_script(hostname, SRUN).host_file == ""
