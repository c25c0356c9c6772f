"""Scripts of users of frameworks, unchanged, on two nodes of two workers each."""

from __future__ import annotations

import json
import shutil
import sys
import sysconfig
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support.cluster.commands import JUELICH, ONE_TASK, require_package
from tests.support.cluster.real_job import launch
from tests.support.pages.blocks import block, replaced
from tests.support.processes import run_launcher

SCRIPTS = Path(__file__).parent / "scripts"
STEPS = 4
PYTHON_H = Path(sysconfig.get_path("include"), "Python.h")
# What install.sh has compiled of DeepSpeed, and what the compiler said if it failed.
EXTENSIONS = Path(sys.prefix, "torch_extensions")
FAILED = EXTENSIONS.with_suffix(".log")


class Framework(NamedTuple):
    """A package, and how its script runs; two tasks per node are direct mode."""

    package: str
    script: str
    environment: str  # what it calls, on CPUs, the environment of torchrun's workers
    tasks: int = 1
    preloaded: str = ""


# Lightning in direct mode is among the examples. Its forks have only torch in common:
# it reads RANK when it is imported.
FRAMEWORKS = {
    "lightning": Framework(
        "lightning",
        "lightning_fit.py",
        "TorchElasticEnvironment",
        preloaded="torch",
    ),
    "accelerate": Framework("accelerate", "accelerate_train.py", "MULTI_CPU"),
    "trainer": Framework("transformers", "trainer_train.py", "distributed", tasks=2),
    "deepspeed": Framework(
        "deepspeed", "deepspeed_train.py", "gloo", preloaded="torch,deepspeed"
    ),
}


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_an_unchanged_script(cluster, framework, tmp_path):
    _need(framework)
    how = FRAMEWORKS[framework]
    options = ["--nproc_per_node=2"] if how.tasks == 1 else []
    # One thread, as an agent sets it: the workers share two cores.
    environ, built = JUELICH | {"OMP_NUM_THREADS": "1"}, {}
    if how.preloaded:
        environ |= {"PET_HPC_PRELOAD": how.preloaded}
    if framework == "deepspeed":
        # Its own copy: a process that is killed leaves a lock behind, for which all
        # later ones would wait.
        copy = shutil.copytree(EXTENSIONS, tmp_path / "extensions")
        environ |= {"TORCH_EXTENSIONS_DIR": str(copy)}
        built = _built(tmp_path)
        assert built
    script = [SCRIPTS / how.script]
    done = launch(cluster, *options, script=script, tasks=how.tasks, environ=environ)
    _check(done, framework)
    assert "HPC169" not in done.stderr
    assert _built(tmp_path) == built  # no test waits for a compiler


def test_accelerate_launch(cluster, tmp_path):
    """Accelerate's own launcher, as documented."""
    _need("accelerate")
    program = block("docs/frameworks.md", "accelerate_cli").text
    (tmp_path / "accelerate_hpc.py").write_text(program)
    small = {"4 * ": "2 * ", "train.py": str(SCRIPTS / "accelerate_train.py")}
    line = replaced(block("docs/frameworks.md", "launch --multi_gpu").text, small)
    command = ["salloc", "-N2", ONE_TASK, "bash", "-c", line]
    done = cluster.run(command, env=JUELICH, cwd=tmp_path)
    _check(done, "accelerate")
    assert "meeting at jwb0001i:29500 over ib0" in done.stderr


def test_exec_and_fork_train_alike(tmp_path):
    """Losses and weights are the same to the last digit."""
    for framework in ("lightning", "accelerate", "trainer"):
        _need(framework)
    forms = []
    for form in ("none", "torch"):
        options = f"--hpc-preload={form}", "--nproc_per_node=2"
        done = run_launcher(*options, SCRIPTS / "all_train.py", tmp_path)
        assert done.code == 0, done.err
        assert "HPC169" not in done.err
        files = (tmp_path / f"{rank}.json" for rank in range(2))
        forms.append([json.loads(file.read_text()) for file in files])
    by_exec, by_fork = forms
    assert by_fork == by_exec
    first, second = by_exec
    for name in first.keys() - {"compile"}:  # each rank has other data
        assert first[name][:-1] != second[name][:-1]
        assert first[name][-1] == second[name][-1]


def _need(framework):
    """Skip where a framework is not installed; in CI, fail."""
    require_package(FRAMEWORKS[framework].package)
    if framework == "deepspeed" and not EXTENSIONS.exists():
        if not (shutil.which("c++") and PYTHON_H.exists()):
            pytest.skip("on CPUs DeepSpeed compiles a part of itself: no c++, Python.h")
        seen = FAILED.read_text() if FAILED.exists() else "nobody has tried"
        pytest.fail(f"tests/more/frameworks/install.sh has not built DeepSpeed: {seen}")


def _built(folder):
    """Return what compilers have made below a folder, and when."""
    made = (path for kind in ("o", "so") for path in folder.rglob(f"*.{kind}"))
    return {path: path.stat().st_mtime_ns for path in made}


def _check(done, framework):
    """Check that there was one world, the launcher's, and that it trained as one."""
    assert done.returncode == 0, done.stderr
    seen = _said(done.stdout)
    assert [worker["host"] for worker in seen] == [
        "jwb0001", "jwb0001", "jwb0002", "jwb0002"
    ]  # fmt: skip
    for rank, worker in enumerate(seen):
        # What the framework made of it, and what the launcher set.
        numbers = {"rank": rank, "local_rank": rank % 2, "world_size": 4}
        assert {name: worker[name] for name in numbers} == numbers
        assert {name: worker[name.upper()] for name in numbers} == {
            name: str(number) for name, number in numbers.items()
        }
        assert worker["MASTER_ADDR"] == "10.20.0.1"
        assert worker["environment"] == FRAMEWORKS[framework].environment
        assert worker["steps"] == STEPS
    # The ranks had different data: nobody trained alone.
    assert len({worker["checksum"] for worker in seen}) == 1


def _said(stdout):
    """Return what scripts/report.py wrote, in the order of the frameworks' ranks."""
    lines = [line for line in stdout.splitlines() if line.startswith('{"framework"')]
    return sorted(map(json.loads, lines), key=lambda worker: int(worker["rank"]))
