"""The stacks of a healthy job's workers, and of a plain user's, without a job."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.support import ROOT
from tests.support.cluster.commands import ENVIRON, FORMS, JUELICH, SCRIPTS
from tests.support.cluster.real_job import launch
from tests.support.patience import PATIENCE, START

COMMAND = ("python", "-m", "torchrun_hpc.stacks")
STALLS = str(SCRIPTS / "stalls.py")
HEALTHY = str(SCRIPTS / "healthy.py")


def test_training_with_pauses_is_no_stall(juelich):
    options = ("--nproc_per_node=3", "--hpc-stall-report=6")
    environ = JUELICH | FORMS["fork"]
    done = launch(juelich, *options, script=[HEALTHY, "14"], environ=environ)
    assert done.returncode == 0, done.stderr
    assert START in done.stderr
    assert not re.search("HPC17[1-9]", done.stderr)


# --- as an ordinary user --------------------------------------------------------------

NOBODY = 65534  # user and group

# The interpreter may lie in a folder that only root can enter: that is empty then, but
# for what is needed.
_AS_A_USER = """
set -e
needed=$1 hidden=$2; shift 2
mount -t tmpfs -o mode=755 tmpfs /mnt
number=0
for path in $needed; do
    number=$((number + 1)); mkdir /mnt/$number; mount --bind "$path" /mnt/$number
done
for path in $hidden; do mount -t tmpfs -o mode=755 tmpfs "$path"; done
number=0
for path in $needed; do
    number=$((number + 1)); mkdir -p "$path"; mount --bind /mnt/$number "$path"
done
cd "$HOME"
exec setpriv --reuid={nobody} --regid={nobody} --clear-groups --bounding-set=-all \
    --inh-caps=-all --no-new-privs "$@"
""".replace("{nobody}", str(NOBODY))

# Starts a job, asks for its stacks until the workers are where they stay, and ends it.
_SESSION = """
mkfifo data; touch stacks
python -m torchrun_hpc --standalone --nproc_per_node=2 "$0" . 2> launcher &
until grep -q "> read stalls.py" stacks && grep -q "> all_reduce" stacks; do
    kill -0 $! || { cat launcher; exit 1; }
    sleep 0.2
    python -m torchrun_hpc.stacks > stacks 2> problem
done
cat stacks problem
grep -E "^(Uid|CapEff|CapBnd)" /proc/self/status >&2
echo data 1<> data
wait $!
echo "exit code $?"
"""


@pytest.fixture
def home():
    """Make a folder of that user, where he can get to it."""
    with tempfile.TemporaryDirectory() as folder:
        os.chown(folder, NOBODY, NOBODY)
        yield Path(folder)


def test_a_user_without_privileges(home):
    """Who may look at processes of his own, as long as the system lets him."""
    needed = [Path(sys.base_prefix).resolve(), Path(sys.prefix).resolve(), ROOT]
    closed = [
        [each for each in path.parents if not each.stat().st_mode & 1]
        for path in needed
    ]
    hidden = {folders[-1] for folders in closed if folders}
    done = subprocess.run(
        [
            # What runs there ends with the test, however that ends.
            *("unshare", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child"),
            *("sh", "-c", _AS_A_USER, "sh"),
            *(" ".join(map(str, needed)), " ".join(map(str, hidden))),
            *("sh", "-c", _SESSION, STALLS),
        ],
        env={
            "HOME": str(home),
            "TMPDIR": str(home),
            "PYTHONPATH": str(ROOT),
            **ENVIRON,
        },
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    launcher = (home / "launcher").read_text()
    assert f"Uid:\t{NOBODY}\t{NOBODY}\t{NOBODY}" in done.stderr
    assert "CapEff:\t0000000000000000\nCapBnd:\t0000000000000000\n" in done.stderr
    *written, code = done.stdout.splitlines()
    assert code == "exit code 0", launcher
    assert len(written) == 3, done.stdout + launcher
    assert re.fullmatch(r"2 ranks: (.* > )?<module> stalls\.py:\d+", written[0])
    assert {line.partition(": ")[0] for line in written[1:]} == {
        "  1 rank (0)",
        "  1 rank (1)",
    }
    assert "torchrun_hpc/" not in done.stdout + launcher  # the launcher's frames
    assert (home / "ended.0").stat().st_uid == NOBODY
