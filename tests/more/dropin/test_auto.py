"""Programs that call torch.distributed.run themselves get exceptions, as from torch."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.cluster.bound import ALL, needs_two_cpus
from tests.support.processes import clean_environ, run_python
from tests.support.stock.side_by_side import OURS, STOCK, words_of

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.xdist_group("auto")

TRAIN = """
import os, signal, sys, time
if sys.argv[1] == "signal":
    os.kill(os.getppid(), signal.SIGTERM)
    time.sleep(900)
sys.exit(int(sys.argv[1]))
"""

# It launches each line, with or without us, and continues whatever happens.
PROGRAM = """
import json, os, sys
rows = json.loads(sys.argv.pop())
if sys.argv.pop() == "ours":
    import torchrun_hpc.auto
from torch.distributed import run

for name, argv, environ in rows:
    os.environ.update(environ)
    ended = []
    try:
        args = run.parse_args(argv)
        if name == "own arguments":
            args.nproc_per_node, args.nnodes = "foo", "1"
        run.run(args)
    except BaseException as error:
        ended = [kind.__name__ for kind in type(error).__mro__]
        ended += [str(error), getattr(error, "code", None)]
    for variable in environ:
        del os.environ[variable]
    print("ended", json.dumps(ended), flush=True)
"""

NOBODY = (
    "--nnodes=1 --rdzv-backend=c10d --rdzv-endpoint=127.0.0.1:9 "
    "--rdzv-conf=is_host=false,read_timeout=1"
)
# The line, the exception of stock torch, and our message's code, if it is a refusal.
ROWS = {
    "runs": ("train.py 0", "", ""),
    "number": ("--nproc-per-node=x t.py", "ValueError", "HPC012"),
    "own arguments": ("train.py 0", "ValueError", "HPC012"),
    "backend": ("--rdzv-backend=x t.py", "ValueError", "HPC014"),
    "redirects": ("--tee=x train.py", "ValueError", "HPC015"),
    "nodes": ("--nnodes=x train.py", "ValueError", "HPC014"),
    "restarts": ("--max-restarts=-1 train.py", "AssertionError", "HPC014"),
    "flag": ("PET_STANDALONE=yes t.py", "ValueError", "HPC011"),
    "no such option": ("--bogus train.py", "SystemExit", ""),
    "help": ("--help", "SystemExit", ""),
    "fails": ("train.py 3", "ChildFailedError", ""),
    "nobody there": (f"{NOBODY} train.py 0", "RendezvousError", ""),
    "runs again": ("train.py 0", "", ""),
    "signal": ("train.py signal", "SignalException", ""),
}


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """How each line has ended, with and without us; one program launches them all."""
    folder = tmp_path_factory.mktemp("auto")
    (folder / "train.py").write_text(TRAIN)
    rows = json.dumps([[name, *words_of(line)] for name, (line, *_) in ROWS.items()])
    found: dict[str, dict[str, Any]] = {name: {} for name in ROWS}
    for which in (OURS, STOCK):
        result = run_python("-c", PROGRAM, which, rows, cwd=folder)
        assert result.code == 0, result.err
        for name, answer in zip(ROWS, _answers(result.out), strict=True):
            found[name][which] = answer
        found["runs"][f"{which} wrote"] = result.err
    return found


def _answers(out: str) -> Iterator[list[Any]]:
    for line in out.splitlines():
        if line.startswith("ended "):
            yield json.loads(line.partition(" ")[2])


@pytest.mark.parametrize("name", ROWS)
def test_a_program_gets_what_torch_raises(name, ended):
    *_, kind, code = ROWS[name]
    ours, stock = ended[name][OURS], ended[name][STOCK]
    assert (kind in stock) if kind else stock == []
    if not code:
        assert (kind in ours) if kind else ours == []
        # SystemExit with the same code.
        assert kind != "SystemExit" or ours[-1] == stock[-1]
        return
    # LaunchError says which message it is, ValueError is what programs look for.
    assert {"LaunchError", "ValueError", "Exception"} <= set(ours)
    text, found = ours[-2:]
    assert found == code
    assert text.startswith(f"{code} ")


def test_a_refusal_is_raised_and_not_printed(ended):
    written = ended["runs"]["ours wrote"]
    for *_, code in ROWS.values():
        assert not code or code not in written
    assert "[HPC010]: unknown option --bogus" in written  # as argparse does


def test_a_failure_of_workers_is_raised_and_reported(ended):
    """The program keeps torch's log lines, and may look for them."""
    for which in (OURS, STOCK):
        assert "failed (exitcode: 3)" in ended["runs"][f"{which} wrote"]
    report = "[HPC125]: the job has failed: worker 0 ended with exit code 3 (local rank"
    assert ended["runs"]["ours wrote"].count(report) == 1


def test_a_program_that_does_not_care(tmp_path):
    """Exit code 1 and a traceback, as of torch; its last line is the message."""
    program = (
        "import torchrun_hpc.auto\n"
        "from torch.distributed.run import main\n"
        "main(['--nnodes=3:2', 'train.py'])\n"
    )
    result = run_python("-c", program, cwd=tmp_path)
    assert result.code == 1
    last = result.err.splitlines()[-1]
    name = "torchrun_hpc.errors.EmbeddedLaunchError"
    assert last.startswith(f"{name}: HPC014 --nnodes=3:2 is not a number")


def test_a_torch_that_is_too_old_cannot_be_imported(tmp_path):
    """A program can continue without us."""
    program = (
        "import torch\n"
        "torch.__version__ = '1.13.1'\n"
        "try:\n    import torchrun_hpc.auto\n"
        "except ImportError as error:\n    print(error)\n"
    )
    result = run_python("-c", program, cwd=tmp_path)
    assert (result.code, result.err) == (0, "")
    assert result.out.startswith("HPC086 torch 1.13.1 is too old")


@needs_two_cpus
def test_its_import_leaves_the_program_its_cpus():
    program = "import os, torchrun_hpc.auto; print(sorted(os.sched_getaffinity(0)))"
    environ = clean_environ() | {"OMP_PROC_BIND": "close"}
    done = run_python("-c", program, environ=environ)
    assert (done.code, done.out, done.err) == (0, f"{ALL}\n", "")
