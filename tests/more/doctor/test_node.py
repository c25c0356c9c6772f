"""What a node shows that only other processes can show."""

from __future__ import annotations

import sys

import pytest

from tests.support.processes import run, run_python
from torchrun_hpc.doctor.results import Folder


def test_torch_is_not_imported(tmp_path):
    program = "import sys, torchrun_hpc.doctor.node; print('torch' in sys.modules)"
    done = run_python("-c", program, cwd=tmp_path)
    assert (done.out, done.err) == ("False\n", "")


# Mounts a file system of 64 kB on the folder $1, with the options $2, and fills it.
MOUNTED = """
mount -t tmpfs -o size=64k none "$1" || exit 77
head -c 65536 /dev/zero > "$1/full" || exit 77
mount -o "remount,$2" "$1" || exit 77
exec "$3" -c 'import sys
from torchrun_hpc.doctor import node
print(node._folder(sys.argv[1]))' "$1"
"""


@pytest.mark.parametrize(
    ("options", "problem"),
    [("rw", "No space left on device"), ("ro", "Read-only file system")],
)
def test_a_file_system_that_takes_nothing(tmp_path, options, problem):
    command = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", MOUNTED]
    command += ["sh", str(tmp_path), options, sys.executable]
    try:
        done = run(command)
    except FileNotFoundError:
        pytest.skip("there is no unshare")
    if done.code in {1, 77} and "Traceback" not in done.err:
        pytest.skip(f"this user may not mount: {done.err}")
    expected = Folder(str(tmp_path), free=0, size=65536, problem=problem)
    assert done.out == f"{expected}\n"
