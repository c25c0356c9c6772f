"""The patches for administrators: with them stock torchrun works where it fails."""

from __future__ import annotations

import importlib.util
import json
import os
import runpy
import shutil
import sys
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support import ROOT
from tests.support.cluster.commands import (
    ALL_REDUCE,
    ENVIRON,
    HPC,
    KILL,
    ONE_TASK,
    STOCK,
    WORLD,
    column,
    own_lines,
    read_workers,
    require,
)
from tests.support.pages.blocks import block, replaced
from tests.support.processes import run

check = SimpleNamespace(**runpy.run_path(str(ROOT / "patches" / "check.py")))
RELEASE = ".".join(version("torch").split(".")[:2])

# The copy of torch is made once.
pytestmark = pytest.mark.xdist_group("patched torch")

TWO = ("-N2", ONE_TASK, KILL)
BY_HAND = ("--nnodes=2", "--rdzv_backend=c10d", "--rdzv_id=1", "--nproc_per_node=1")
GLOO = ENVIRON | {"GLOO_SOCKET_IFNAME": "ib0"}


@pytest.fixture(scope="module")
def patched(tmp_path_factory):
    """Return the variables with which Python finds a patched copy of its torch.

    The copy is made of links. Only what the patch changes is copied.
    """
    require(None if shutil.which("patch") else "not installed: patch")
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    original = Path(str(spec.origin)).parents[1]
    root = tmp_path_factory.mktemp("patched")
    shutil.copytree(original / "torch", root / "torch", copy_function=os.symlink)
    patch = check.by_release(list((ROOT / "patches").glob("*.patch")))[RELEASE]
    before = {}
    for path in check.targets(patch):
        before[path] = (original / path).read_bytes()
        (root / path).unlink()
        shutil.copyfile(original / path, root / path)

    check.apply(patch, root)

    for path, text in before.items():
        assert (original / path).read_bytes() == text
        assert (root / path).read_bytes() != text
    return {"PYTHONPATH": str(root)}


def test_it_applies_and_can_be_undone():
    assert check.main([RELEASE]) == 0


def test_stock_torchrun_works_over_the_fast_network(juelich, patched):
    line = block("patches/README.md", "main.py").text
    small = {"--nproc-per-node=4": "--nproc-per-node=1", "main.py": ALL_REDUCE}
    command = ["salloc", "-N2", ONE_TASK, "bash", "-c", replaced(line, small)]
    done = juelich.run(command, env=GLOO | patched)
    assert done.returncode == 0, done.stderr
    totals: list[Any] = column(done, "RANK", "host", "total")
    assert totals == [("0", "jwb0001", 1.0), ("1", "jwb0002", 1.0)], done.stdout


def test_the_address_that_is_shown(juelich, patched):
    line = block("patches/README.md", "printenv").text
    command = ["salloc", "-N2", ONE_TASK, "bash", "-c", line]
    done = juelich.run(command, env=ENVIRON | patched)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["10.20.0.1", "10.20.0.1"], done.stdout


@pytest.mark.parametrize(
    "launcher",
    [(*STOCK, *BY_HAND), (*HPC, "--hpc-rendezvous=c10d")],
    ids=["torchrun", "torchrun_hpc"],
)
def test_ranks_follow_the_names_and_the_address_is_on_the_endpoints_network(
    unpadded, patched, launcher
):
    """Also if another node than the first one is the host; and not only in torchrun."""
    command = (*launcher, "--rdzv_endpoint=n10i:23456", WORLD)
    done = unpadded.srun(*TWO, *command, env=GLOO | patched)
    assert done.returncode == 0, done.stderr
    if "torchrun_hpc" in launcher:
        assert len(own_lines(done.stderr)) == 1, done.stderr
    assert column(done, "GROUP_RANK", "host", "MASTER_ADDR") == [
        ("0", "n9", "10.20.0.1"),
        ("1", "n10", "10.20.0.1"),
    ], done.stdout


def test_an_explicit_address_wins(unpadded, patched):
    command = " ".join([*STOCK, *BY_HAND, "--rdzv_endpoint=n9i:23456"])
    done = unpadded.srun(
        *(*TWO, "sh", "-c", f"exec {command} --local-addr=$(hostname) {WORLD}"),
        env=GLOO | patched,
    )
    assert done.returncode == 0, done.stderr
    assert column(done, "host", "MASTER_ADDR") == [
        ("n9", "n9"),
        ("n10", "n9"),
    ], done.stdout


def test_one_node_stays_by_itself(patched):
    command = [sys.executable, *STOCK[1:], "--standalone", "--nproc_per_node=2", WORLD]
    done = run(command, environ=os.environ | patched)
    assert done.code == 0, done.err
    assert column(read_workers(done.out), "MASTER_ADDR", "RANK") == [
        ("127.0.0.1", "0"),
        ("127.0.0.1", "1"),
    ]


TELL = """
import json, sys
from pathlib import Path
from torch.distributed.elastic.rendezvous import utils
def told(names):
    return {
        "own": [name for name in names if utils._matches_machine_hostname(name)],
        "several": [utils._get_local_addr(name, 2) for name in names],
        "one": [utils._get_local_addr(name, 1) for name in names],
    }
second, *names = sys.argv[1:]
before = told([second])
foreign_too = Path("/proc/sys/net/ipv4/ip_nonlocal_bind")
foreign_too.write_text("1")
try:
    after = told(names)
finally:
    foreign_too.write_text("0")
order = sorted(["n10", "n9i", "n9", "r2n10", "n", "10", "n9.cluster", "r10n1"],
               key=utils._natural_order)
print(json.dumps([before, after, order]))
"""
OWN = ["localhost", "127.0.0.1", "jwb0001", "jwb0001i", "10.10.0.1", "10.20.0.1"]
FOREIGN = ["0.0.0.0", "jwb0002i", "10.20.0.2", "jwb0002", "unknown", "192.0.2.1"]


def test_a_host_knows_its_own_names_and_addresses(juelich, patched):
    """Also an address of which the kernel never sends by itself.

    And also if the kernel lets programs bind to addresses of other hosts.
    """
    second = "10.20.0.101"
    change = (f"{second}/24", "dev", "ib0")
    juelich.run(["ip", "addr", "add", *change], host="jwb0001", check=True)
    try:
        here, there = (
            json.loads(
                juelich.run(
                    ["python", "-c", TELL, second, *OWN, *FOREIGN],
                    host=host,
                    env=ENVIRON | patched,
                    check=True,
                ).stdout
            )
            for host in ("jwb0001", "jwb0002")
        )
    finally:
        juelich.run(["ip", "addr", "del", *change], host="jwb0001", check=True)
    before, after, order = here
    assert before["own"] == before["several"] == [second]
    assert (there[0]["own"], there[0]["several"]) == ([], ["10.20.0.2"])
    assert after["own"] == OWN
    slow, fast, alone = "10.10.0.1", "10.20.0.1", "127.0.0.1"
    own = [slow, fast, slow, fast]
    foreign = [fast, fast, slow, "", ""]
    assert after["several"] == ["", "", *own, "", *foreign]
    assert after["one"] == [alone, alone, *own, alone, *foreign]
    assert order == [*("10", "n", "n9", "n9.cluster", "n9i", "n10", "r2n10", "r10n1")]
