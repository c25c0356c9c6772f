"""Jobs with a key: whose nodes have another one, and that others want to join."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.cluster.commands import (
    HOSTS,
    SCRIPTS,
    on_node,
    read_workers,
    refused,
    until_there,
)
from tests.support.cluster.real_job import RealJob, launch
from tests.support.cluster.steady_job import SteadyJob
from torchrun_hpc.host.procfs import file_system

MOUNTS = Path("/proc/self/mountinfo")


def own(name):
    return rf"\S+/{name} \([0-9a-f]{{8}}\)"


def test_nodes_with_different_keys(unpadded, tmp_path):
    """Each names its own, and node 0 waits as for a node that is missing."""
    first = f"export PET_HPC_KEY_FILE={tmp_path}/key.$SLURM_NODEID"
    with RealJob(unpadded, first=first) as job:
        job.says(
            r"warning\[HPC237\]: ignored 10\.10\.0\.2, which does not prove that it "
            rf"belongs to this job\. .*, has another key, .*\. Key here: {own('key.0')}"
        )
        job.says(
            r"HPC119]: on n10: the head node at 10\.10\.0\.1:\d+ does not prove that "
            rf"it belongs to job .*, or has another key\. Key here: {own('key.1')}"
        )
        job.says(
            r"HPC114]: 1 of 2 nodes .* n10 \(node 1\).* without a proof: 10\.10\.0\.2"
        )
        job.signal(0, "SIGINT")
        job.agent_ends(0)
    assert job.output.count("HPC237") == 1, job.output
    assert "Traceback" not in job.output


FOLDER = "HERE/torchrun_hpc/key"
SET = "Set a file that only you can read, or that this node can create"
OTHER = "Pass --hpc-key-file=FILE on a shared file system"
# Options, who asks for a key, and the rest of the message.
UNUSABLE = {
    "a folder instead of the key": (
        f"--hpc_key_file={FOLDER}",
        f"unusable ({FOLDER}: Is a directory). {SET}",
    ),
    "a folder instead of the default key": (
        "",
        f"unusable ({FOLDER}: Is a directory). {OTHER}, or remove this file",
    ),
    "an explicit key that cannot be made": (
        "--hpc_key_file=/sys/key",
        f"none (/sys/key: Permission denied). {SET}",
    ),
    "a key that is required": (
        "--hpc_auth=require",
        f"none ({FOLDER}: nodes do not share its file system (KIND)). {OTHER}",
    ),
}
UNSET = "unset PET_HPC_KEY_FILE"  # of the cluster


@pytest.mark.parametrize("case", UNUSABLE)
def test_a_launch_that_is_refused_because_of_its_key(unpadded, tmp_path, case):
    """Each node says so itself, because it cannot tell the others."""
    (asked, rest), kind = UNUSABLE[case], file_system(tmp_path, MOUNTS.read_text())
    if "a folder" in case:
        (tmp_path / "torchrun_hpc" / "key").mkdir(parents=True)
    said = launch(
        unpadded,
        *filter(None, [asked.replace("HERE", str(tmp_path))]),
        srun=["--kill-on-bad-exit=0"],
        first=f"{UNSET}; export XDG_CONFIG_HOME={tmp_path}",
    )
    by = f" ({asked})" if asked else ""
    text = f"this node needs a usable key{by}. Key here: {rest}"
    text = text.replace("HERE", str(tmp_path)).replace("KIND", kind)
    assert sorted(line for line in refused(said) if "torchrun_hpc:" in line) == [
        f"torchrun_hpc: error[HPC238]: on {host}: {text}" for host in ("n10", "n9")
    ]


def test_a_dry_run_shows_the_key_and_makes_none(unpadded, tmp_path):
    key, found = tmp_path / "key", []
    for name in rf"none yet \({key}: a launch creates it\)", own("key"):
        done = launch(unpadded, f"--hpc_key_file={key}", "--hpc-dry-run")
        row = rf"^--hpc_key_file +{name} +--hpc_key_file={key}$"
        assert re.search(row, done.stdout, re.MULTILINE), done.stdout
        assert "HPC23" not in done.stderr, done.stderr
        found.append(key.exists())
        key.write_bytes(bytes(range(32)))
        key.chmod(0o600)
    assert found == [False, True]


def test_nodes_where_no_key_is_possible(unpadded, tmp_path):
    """Each of them says so."""
    first = f"{UNSET}; export XDG_CONFIG_HOME={tmp_path}"
    done = launch(unpadded, first=first)
    assert len(read_workers(done)) == 2
    name = f"none ({tmp_path}/torchrun_hpc/key: nodes do not share its file system "
    for host in HOSTS:
        begin = f"warning[HPC236]: on {host}: anybody who knows this job's number can "
        begin += "join it, or pretend to be its head node. Key here: "
        assert done.stderr.count(f"{begin}{name}") == 1, done.stderr
    assert done.stderr.count("HPC236") == 2, done.stderr


def test_a_node_whose_key_cannot_be_used(unpadded, tmp_path):
    """It does not join, and says so at once; the others wait for it."""
    key = tmp_path / "key.1"
    key.mkdir()
    first = f"export PET_HPC_KEY_FILE={tmp_path}/key.$SLURM_NODEID"
    with RealJob(unpadded, first=first) as job:
        job.says(
            r"HPC238]: on n10: this node needs a usable key \(PET_HPC_KEY_FILE="
            rf"{key}\)\. Key here: unusable \({key}: Is a directory\)\. Set a file "
        )
        job.says(r"HPC114]: 1 of 2 nodes .* n10 \(node 1\)")
        job.signal(0, "SIGINT")
        job.agent_ends(0)
    assert "HPC237" not in job.output, job.output  # it has not even called


def test_a_job_keeps_its_key(unpadded, tmp_path):
    """An agent that starts later has to have the same."""
    key = tmp_path / "key"
    first = (
        f'export PET_HPC_KEY_FILE={key}; "$@"; code=$?; test $code = 137 || exit $code'
        f'; "$@"; echo second $?; {until_there(tmp_path / "third")}'
    )
    with SteadyJob(unpadded, tmp_path, "--max-restarts=1", nodes=3, first=first) as job:
        job.works()
        kept = key.rename(tmp_path / "kept")
        job.signal(2, "SIGKILL")
        job.says("HPC123]: the agent on n11 .node 2. is gone")
        job.says(rf"HPC119]: on n11: .*, or has another key\. Key here: {own('key')}")
        job.says("second 2")
        kept.rename(key)
        (tmp_path / "third").touch()
        job.works(1)
        job.stop()
        job.ends(0)
    assert job.output.count("HPC237]: ignored 10.10.0.3") == 1, job.output


@pytest.mark.release
def test_another_user_who_has_the_port_first(unpadded, tmp_path):
    """It is not believed, and what it passes on to the coordinator does not count."""
    imposter = f"python {SCRIPTS}/imposter.py {tmp_path} 10.10.0.1"
    first = f"name=second; {on_node(0, f'name=first; {imposter} &')}; "
    first += until_there(f"{tmp_path}/$name")
    with SteadyJob(unpadded, tmp_path, nodes=3, first=first) as job:
        job.works()
        job.wait((tmp_path / "passed_on").exists)
        job.says("HPC237]: ignored 10.10.0.1, which does not prove")
        job.stop()
        job.says("rank 0, attempt 0")
    assert (tmp_path / "pretended").exists(), job.output
    assert not (tmp_path / "believed").exists(), job.output
    assert job.output.count("HPC237") == 1, job.output
    assert "Traceback" not in job.output
