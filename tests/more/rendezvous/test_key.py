"""The file with the user's key: a full disk, and many who make it at once."""

from __future__ import annotations

import multiprocessing
import subprocess
import sys

from tests.support.cluster import testbed
from tests.support.cluster.commands import require
from tests.support.patience import PATIENCE
from torchrun_hpc.planning.meeting import KeyFile
from torchrun_hpc.rendezvous.key import Key

PROCESSES = 64


def load_when_all_are_here(file, barrier, replies):
    barrier.wait(PATIENCE)
    key = Key(KeyFile(str(file), source="--hpc_key_file=FILE"), "19.0")
    key.load()
    replies.put(key.secret.key)


def test_all_who_make_it_at_once_get_the_same(tmp_path):
    file, forks = tmp_path / "key", multiprocessing.get_context("fork")
    barrier, replies = forks.Barrier(PROCESSES), forks.SimpleQueue()
    here = [
        forks.Process(target=load_when_all_are_here, args=(file, barrier, replies))
        for _ in range(PROCESSES)
    ]
    for each in here:
        each.start()
    found = {replies.get() for _ in here}
    for each in here:
        each.join()
    assert found == {file.read_bytes()}
    assert [*tmp_path.iterdir()] == [file]


LOAD = """
import contextlib, sys
from torchrun_hpc.errors import LaunchError
from torchrun_hpc.planning.meeting import KeyFile
from torchrun_hpc.rendezvous.key import Key
key = Key(KeyFile(sys.argv[1], source="--hpc_key_file=FILE"), "19.0")
with contextlib.suppress(LaunchError):  # the path is explicit
    key.load()
print(bool(key.secret.key), key.name)
"""
FULL = """
mount -t tmpfs -o size=4k key "$1"
head -c 4096 /dev/zero > "$1/full"
"$2" -c "$3" "$1/key"
ls -A "$1"
mount -o remount,ro "$1"
"$2" -c "$3" "$1/key"
"""


def test_a_full_disk_leaves_nothing(tmp_path):
    require(testbed.missing())
    words = ["unshare", "--mount", "sh", "-ec", FULL, "sh", str(tmp_path)]
    done = subprocess.run(
        [*words, sys.executable, LOAD], capture_output=True, text=True, check=False
    )
    file = tmp_path / "key"
    assert done.stdout.splitlines() == [
        f"False none ({file}: No space left on device)",
        "full",
        f"False none ({file}: Read-only file system)",
    ], done
