"""A training that stalls: who waits for whom is reported, and can be asked."""

from __future__ import annotations

import json
import os
import re

from tests.support.cluster.commands import ENVIRON, FORMS, JUELICH, SCRIPTS, lines
from tests.support.cluster.real_job import RealJob
from tests.support.pages.blocks import block, replaced
from tests.support.patience import until

LIMIT_S = 5

# One of six workers, two on each node, waits for data, and the others wait for it.
TREE = (
    r"6 ranks: (.* > )?<module> stalls\.py:\d+",
    r"  5 of 6 ranks \(0-4\): step stalls\.py:\d+ > (.* > )?all_reduce \S+:\d+",
    r"\* 1 rank \(5, jwb0003\): step stalls\.py:\d+ > read stalls\.py:\d+",
)

COLLECTIVE = (
    "all_reduce 1 of group 0 (float32[1]): 5 of 6 ranks (0-4); 1 rank (5, jwb0003) did "
    "not call it, nor any other"
)

# How the command is started in the job.
LINE = block("docs/troubleshooting.md", "--jobid=N").text
ASKED = {
    "on another node": {"srun": "srun -N1 --nodelist=jwb0002"},
    "on all nodes": {".stacks": ".stacks --collectives"},
    "for machines": {"srun": "srun -N1", ".stacks": ".stacks --json"},
}


def assert_tree(written):
    """See that these lines are the tree."""
    assert len(written) == len(TREE), written
    for line, expected in zip(written, TREE, strict=True):
        assert re.fullmatch(expected, line), line


def answer_to(line, cluster):
    """Ask until all have answered. A node has three seconds, and so has py-spy."""
    answers = []

    def is_complete():
        answers.append(cluster.run(["bash", "-c", line], env=ENVIRON))
        told = answers[-1].stdout + answers[-1].stderr
        return not re.search('no answer|"missing": "[^"]', told)

    until(is_complete, lambda: answers[-1])
    return answers[-1]


def test_a_stall(juelich, tmp_path):
    """Node 0 reports it once; who asks gets the same; then the training continues."""
    os.mkfifo(tmp_path / "data")
    with RealJob(
        juelich,
        *("--nproc_per_node=2", f"--hpc-stall-report={LIMIT_S}"),
        script=[SCRIPTS / "stalls.py", tmp_path],
        nodes=3,
        srun=["--label"],
        environ=JUELICH | FORMS["fork"],
    ) as job:
        job.says("HPC171")
        in_job = {"--jobid=N": f"--jobid={job.job_id()}"}
        answers = {
            name: answer_to(replaced(LINE, in_job | how), juelich)
            for name, how in ASKED.items()
        }
        writing = os.open(tmp_path / "data", os.O_WRONLY | os.O_NONBLOCK)
        os.write(writing, b"data")
        os.close(writing)
        job.ends(0)
    assert {path.suffix[1:] for path in tmp_path.glob("ended.*")} == set("012345")

    assert "0: torchrun_hpc: warning[HPC171]: " in job.output
    assert job.output.count("HPC171") == 1, job.output
    report = job.output.partition("HPC171]: ")[2].splitlines()
    assert report[0] == (
        f"the stacks of 6 workers have not changed for {LIMIT_S} s "
        "(--hpc-stall-report). The job continues:"
    )
    indent = "0:     "
    assert all(line.startswith(indent) for line in report[1:5]), job.output
    assert_tree([line[len(indent) :] for line in report[1:4]])
    assert report[4:] == [indent + COLLECTIVE]

    for answer in answers.values():
        assert (answer.returncode, lines(answer.stderr)) == (0, []), answer
        assert "torchrun_hpc/" not in answer.stdout  # frames of the launcher
    assert "torchrun_hpc/" not in job.output
    for where in "on another node", "on all nodes":
        first, *tree = answers[where].stdout.splitlines()
        assert re.fullmatch(r"launch \d+\.0", first)
        assert_tree(tree[:3])
        assert tree[3:] == ([COLLECTIVE] if where == "on all nodes" else [])
    (shown,) = json.loads(answers["for machines"].stdout)
    assert shown["missing"] == ""
    workers = shown["workers"]
    assert [(w["rank"], w["node"], w["host"], w["problem"]) for w in workers] == [
        (rank, rank // 2, f"jwb000{rank // 2 + 1}", "") for rank in range(6)
    ]
    last = [w["frames"][-1].split()[0] for w in workers]
    assert last == ["all_reduce"] * 5 + ["read"]
