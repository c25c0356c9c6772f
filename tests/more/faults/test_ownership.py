"""Jobs with a key: whose nodes have another one, and that others want to join."""

from __future__ import annotations

import pytest
from commands import HPC, LINE, SCRIPTS, launch, refused
from steps import Step

STEADY = str(SCRIPTS / "steady.py")


def own(name):
    return rf"\S+/{name} \([0-9a-f]{{8}}\)"


def test_nodes_with_different_keys(unpadded, tmp_path):
    """Each names its own, and node 0 waits as for a node that is missing."""
    first = f"export PET_HPC_KEY_FILE={tmp_path}/key.$SLURM_NODEID; exec "
    with Step(unpadded, "sh", "-c", first + LINE, nodes=2) as job:
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
        job.send("n9", "SIGINT")
    assert job.output.count("HPC237") == 1, job.output
    assert "Traceback" not in job.output


def test_a_key_that_is_required(unpadded, tmp_path):
    options = ("--hpc-auth=require", f"--hpc-key-file={tmp_path}")
    said = refused(launch(unpadded, *options, srun=["--kill-on-bad-exit=0"]))
    assert sorted(line for line in said if "error" in line) == [
        f"torchrun_hpc: error[HPC238]: on {host}: --hpc_auth=require needs a key. Key "
        f"here: none ({tmp_path}: Is a directory). Pass --hpc-key-file=FILE on a "
        "shared file system"
        for host in ("n10", "n9")
    ]


def test_a_job_keeps_its_key(unpadded, tmp_path):
    """An agent that starts later has to have the same."""
    key, argv = tmp_path / "key", [*HPC, "--max-restarts=1", STEADY, str(tmp_path)]
    line = " ".join(argv)
    command = (
        f"export PET_HPC_KEY_FILE={key}; {line}; code=$?; "
        "test $code = 137 || exit $code; "
        f"{line}; echo second $?; until test -e {tmp_path}/third; do sleep 0.1; done; "
        f"exec {line}"
    )
    with Step(unpadded, "sh", "-c", command) as job:
        job.wait(lambda: len([*tmp_path.glob("up*.0")]) == 3)
        kept = key.rename(tmp_path / "kept")
        job.send("n11", "SIGKILL")
        job.says("HPC123]: the agent on n11 .node 2. is gone")
        job.says(rf"HPC119]: on n11: .*, or has another key\. Key here: {own('key')}")
        job.says("second 2")
        kept.rename(key)
        (tmp_path / "third").touch()
        job.wait(lambda: len([*tmp_path.glob("up*.1")]) == 3)
        (tmp_path / "stop").touch()
        assert job.end() == 0, job.output
    assert job.output.count("HPC237]: ignored 10.10.0.3") == 1, job.output


@pytest.mark.release
def test_another_user_who_has_the_port_first(unpadded, tmp_path):
    """It is not believed, and what it passes on to the coordinator does not count."""
    line = " ".join([*HPC, STEADY, str(tmp_path)])
    command = (
        f"if test $SLURM_NODEID = 0; then name=first; "
        f"python {SCRIPTS}/imposter.py {tmp_path} 10.10.0.1 & else name=second; fi; "
        f"until test -e {tmp_path}/$name; do sleep 0.1; done; exec {line}"
    )
    with Step(unpadded, "sh", "-c", command) as job:
        job.wait(lambda: len([*tmp_path.glob("up*.0")]) == 3)
        job.wait((tmp_path / "passed_on").exists)
        job.says("HPC237]: ignored 10.10.0.1, which does not prove")
        (tmp_path / "stop").touch()
        job.says("rank 0, attempt 0")
    assert (tmp_path / "pretended").exists(), job.output
    assert not (tmp_path / "believed").exists(), job.output
    assert job.output.count("HPC237") == 1, job.output
    assert "Traceback" not in job.output
