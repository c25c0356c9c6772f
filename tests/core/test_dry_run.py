"""--hpc-dry-run: nodes meet, one tells what all would do, and nothing is started."""

from __future__ import annotations

import doctest
import json
import platform
import re

from tests.support.cluster.commands import JUELICH, lines
from tests.support.pages.blocks import block
from torchrun_hpc.planning.head_node import port_of


def test_table(juelich):
    """It is what the page shows, but for the number of the job, and what follows.

    And but for the key, which the nodes of the page have in a home that they share.
    """
    command = block("docs/troubleshooting.md", "--hpc-dry-run").text
    foreign = juelich.foreign_bytes("eth0")
    done = juelich.run(["bash", "-c", command], env=JUELICH)
    assert done.returncode == 0, done.stderr
    assert juelich.foreign_bytes("eth0") == foreign
    assert lines(done.stderr) == [], done.stderr
    print(done.stdout)
    rows = [line.split() for line in done.stdout.splitlines()]
    (launch_id,) = (row[1] for row in rows if row[:1] == ["--rdzv_id"])
    printed = re.sub(rf"(?<![\d.]){re.escape(launch_id)}\b", "1.0", done.stdout)
    printed = re.sub("--hpc_key_file .*\n", "", printed)
    for here, there in (
        (str(port_of(launch_id)), str(port_of("1.0"))),
        (platform.python_version(), "3.11.7"),
    ):
        assert here in printed, printed
        printed = printed.replace(here, there)
    shown = block("docs/troubleshooting.md", "Nothing was started").text
    as_shown = doctest.OutputChecker().check_output(
        shown, printed, doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    )
    assert as_shown, printed
    assert sum(row[:1] == ["torchrun"] for row in rows) == 3
    assert all(row[-2:] == ["main.py", "--lr=1"]
               for row in rows if row[:1] == ["torchrun"])  # fmt: skip


# What a program prints that asks for the same.
DESCRIBE = (
    "import json, sys, torchrun_hpc; "
    "print(json.dumps(torchrun_hpc.describe(sys.argv[1:])))"
)


def test_json_is_what_a_program_is_told(juelich):
    """On one node, without one of the patches."""
    options = "--nproc_per_node=2 --hpc-without-patches=node_order"
    dry_run = f"python -m torchrun_hpc --hpc-dry-run=json {options} SCRIPT"
    both = f"{dry_run}; exec python -c '{DESCRIBE}' {options}"
    done = juelich.srun("-N1", "sh", "-c", both, env=JUELICH)
    assert done.returncode == 0, done.stderr
    assert lines(done.stderr) == [], done.stderr
    text, asked = done.stdout.rsplit("\n", 2)[:2]
    printed = json.loads(text)
    (node,) = printed["nodes"]
    assert node == json.loads(asked)
    assert printed["missing"] == []
    assert node["workers"]["number"] == 2
    states = {patch["name"]: patch["state"] for patch in node["patches"]}
    assert states["node_order"] == "left out: --hpc-without-patches"
