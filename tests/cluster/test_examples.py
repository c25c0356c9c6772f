"""The examples, by the job scripts of examples/README.md, small.

Where normalisation and learning rate are fixed, the losses are those of one worker,
whatever the number of workers, and also if the job was killed and submitted again.
"""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest
from commands import ENVIRON, JUELICH, ONE_TASK, ROOT, require
from job_scripts import job_script, pbs_resources
from launchers import MPICH_4, OPENMPI_4

if TYPE_CHECKING:
    from pathlib import Path

    from testbed import Cluster, Submitted

pytestmark = pytest.mark.timeout(300)

# Of 8 images a step, whoever has them.
RESNET = "--images 32 --image-size 32 --epochs 2 --norm group --fixed-lr --lr 0.003"
RESNET += " --log-every 1 --train-num-workers 0 --batch-size "
BATCHNORM = "--images 16 --image-size 32 --epochs 3 --batch-size 4"
FSDP = "--size tiny --length 32 --batch-size 8 --lr 0.001 --steps 120 --save-every 60"

# No python of this environment: the scripts activate it. One thread, for workers that
# share two cores.
PLAIN = {"OMP_NUM_THREADS": "1"}
SITE = PLAIN | {"SYSTEMNAME": JUELICH["SYSTEMNAME"]}

# Options of sbatch count more than those in the script.
SMALL = ("--nodes=2", "--partition=batch", "--gres=gpu:2", "--cpus-per-task=1")
TWO_WORKERS = {"--nproc_per_node=gpu": "--nproc_per_node=2"}
ONE_WORKER = {"--nproc_per_node=gpu": "--nproc_per_node=1"}

Losses = dict[tuple[int, ...], float]


def losses(output: str) -> Losses:
    """Return the losses that were printed, by epoch and images, or by step."""
    epochs = re.findall(r"^epoch (\d+)(?:, (\d+) of \d+ images)?: loss (\S+?),?(?: |$)",
                        output, re.MULTILINE)  # fmt: skip
    found = {(int(e), int(images or 0)): float(loss) for e, images, loss in epochs}
    steps = re.findall(r"^step (\d+): loss (\S+),", output, re.MULTILINE)
    found |= {(int(step),): float(loss) for step, loss in steps}
    assert found, output
    return found


def check_fall(found: Losses) -> None:
    """The last loss is well below the first."""
    values = list(found.values())
    assert values[-1] < 0.9 * values[0], found


def check_same(found: Losses, reference: Losses, rounding: float = 1e-3) -> None:
    """The losses are those of the reference, from some step on to the last."""
    wanted = {when: reference[when] for when in found}
    assert found == pytest.approx(wanted, rel=rounding)


def alone(example: str, arguments: str) -> Losses:
    """Train in one process, without any launcher."""
    world = dict.fromkeys(("RANK", "LOCAL_RANK", "MASTER_PORT"), "0")
    world |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), "1")
    done = subprocess.run(
        [sys.executable, ROOT / "examples" / example, *arguments.split()],
        env=ENVIRON | world | {"MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = losses(done.stdout)
    check_fall(found)
    return found


@pytest.fixture(scope="module")
def resnet() -> Losses:
    """Return the losses of one worker."""
    return alone("resnet50_ddp.py", f"{RESNET} 8")


@pytest.fixture(scope="module")
def fsdp() -> Losses:
    """Return the losses of one worker."""
    return alone("fsdp.py", FSDP)


@pytest.fixture(scope="module", autouse=True)
def packages() -> None:
    """Skip where something is missing; in CI, fail."""
    needed = ("torchvision", "lightning", "accelerate")
    absent = [name for name in needed if importlib.util.find_spec(name) is None]
    require(f"not installed: {', '.join(absent)}" if absent else None)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Make a folder with what a user has in it: the examples, and an environment."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    (tmp_path / ".venv").symlink_to(sys.prefix)
    return tmp_path


def wait_for(job: Submitted, pattern: str) -> None:
    """Wait until a job has written a line."""
    end = time.monotonic() + 120
    while not re.search(pattern, "".join(job.outputs), re.MULTILINE):
        assert time.monotonic() < end, f"no {pattern!r} in:\n{''.join(job.outputs)}"
        time.sleep(0.05)


def signal_to(cluster: Cluster, job: Submitted, name: str) -> None:
    """Send a signal to a job's steps, as ``#SBATCH --signal`` does."""
    cluster.run(["scancel", f"--signal={name}", job.job], check=True)


# --- Slurm ----------------------------------------------------------------------------


def test_resnet_is_killed_and_submitted_again(
    juelich: Cluster, resnet: Losses, folder: Path
) -> None:
    script = job_script("Jülich", "resnet50_ddp.py").smaller(f"{RESNET} 2", TWO_WORKERS)

    def submit() -> Submitted:
        return juelich.submit(script, *SMALL, env=SITE, cwd=folder)

    first = submit()
    wait_for(first, "^epoch 1, 8 of 32 images")
    signal_to(juelich, first, "USR1")
    wait_for(first, "^checkpoint: epoch 1, (8|16|24) images$")
    signal_to(juelich, first, "KILL")
    done = juelich.wait(first)
    assert done.returncode != 0
    check_same(losses(done.output), resnet)

    again = juelich.wait(submit())
    assert again.returncode == 0, again.output
    assert re.search("^resumed: epoch 1, (8|16|24) images$", again.output, re.MULTILINE)
    check_same(losses(again.output), resnet)
    assert max(resnet) in losses(again.output)


def test_fsdp_is_killed_and_submitted_again_with_fewer_workers(
    juelich: Cluster, fsdp: Losses, folder: Path
) -> None:
    script = job_script("Jülich", "fsdp.py").smaller(FSDP, TWO_WORKERS)
    first = juelich.submit(script, *SMALL, env=SITE, cwd=folder)
    wait_for(first, "^checkpoint: step 60$")
    signal_to(juelich, first, "KILL")
    done = juelich.wait(first)
    assert done.returncode != 0
    assert "(between_nodes=2, within_node=2)" in done.output
    check_same(losses(done.output), fsdp)

    again = juelich.sbatch(script, *SMALL, "--nodes=1", env=SITE, cwd=folder)
    assert again.returncode == 0, again.output
    assert "resumed: step 60\n" in again.output
    assert "(between_nodes=1, within_node=2)" in again.output
    check_same(losses(again.output), fsdp)
    assert max(fsdp) in losses(again.output)


@pytest.mark.parametrize(
    ("centre", "tasks", "small", "each"),
    [
        ("Dresden", "--ntasks-per-node=1", ONE_WORKER, 4),
        ("ThaiSC", "--ntasks-per-node=2", {}, 2),
    ],
    ids=["agent", "direct"],
)
def test_resnet(  # noqa: PLR0913, PLR0917
    unpadded: Cluster,
    resnet: Losses,
    folder: Path,
    centre: str,
    tasks: str,
    small: dict[str, str],
    each: int,
) -> None:
    script = job_script(centre, "resnet50_ddp.py").smaller(f"{RESNET} {each}", small)
    done = unpadded.sbatch(script, *SMALL, tasks, env=PLAIN, cwd=folder)
    assert done.returncode == 0, done.output
    check_same(losses(done.output), resnet)


def test_lightning(unpadded: Cluster, folder: Path) -> None:
    script = job_script("Dresden", "lightning_ddp.py").text
    done = unpadded.sbatch(script, *SMALL, "--ntasks-per-node=2", env=PLAIN, cwd=folder)
    assert done.returncode == 0, done.output
    assert "Starting with 4 processes" in done.output
    check_fall(losses(done.output))


def test_tensorflow(juelich: Cluster) -> None:
    """Each process tells TensorFlow all nodes, by names that reach each other."""
    program = ROOT / "examples/tensorflow/tf_config.py"
    done = juelich.srun("-N3", ONE_TASK, "python", program, env=JUELICH)
    assert done.returncode == 0, done.stderr
    seen = [json.loads(line) for line in done.stdout.splitlines()]
    tasks = sorted((config["task"]["type"], config["task"]["index"]) for config in seen)
    assert tasks == [("worker", 0), ("worker", 1), ("worker", 2)]
    (workers,) = {tuple(config["cluster"]["worker"]) for config in seen}
    (port,) = {worker.partition(":")[2] for worker in workers}
    assert 20000 <= int(port) < 29000
    assert workers == tuple(f"{name}i:{port}" for name in juelich.names)


# --- PBS, and no scheduler ------------------------------------------------------------


def test_fsdp_by_the_launch_line_of_pbs(
    bare: Cluster, fsdp: Losses, folder: Path
) -> None:
    """MPICH stands in for HPE Cray PALS; it binds nothing."""
    page = job_script("Boulder", "fsdp.py")
    _, resources = pbs_resources(page.text)
    hosts = [host for host in ("n9", "n10") for _ in range(resources["mpiprocs"])]
    (folder / "nodes").write_text("".join(f"{host}\n" for host in hosts))
    arguments = f"{FSDP} --precision bf16"
    script = page.smaller(arguments, ONE_WORKER | {"--cpu-bind none ": ""})
    pbs = {
        "PBS_JOBID": "7.desched1",
        "PBS_NODEFILE": str(folder / "nodes"),
        "PBS_O_WORKDIR": str(folder),
        "PBS_ENVIRONMENT": "PBS_BATCH",
        "NCAR_HOST": "derecho",
    }
    path = {"PATH": MPICH_4.install(bare, folder)}
    done = bare.run(["bash"], host="n9", env=PLAIN | pbs | path, input=script)
    assert done.returncode == 0, done.stderr
    assert "HPC001 2 nodes, 1 worker on this one, Hydra in PBS 7." in done.stderr
    assert "site derecho" in done.stderr
    assert "bf16, DeviceMesh((all=2)" in done.stdout
    check_same(losses(done.stdout), fsdp, rounding=0.01)


def test_accelerate_by_mpirun(bare: Cluster, folder: Path) -> None:
    page = job_script("Two machines", "accelerate_ddp.py")
    script = page.smaller(
        "", {"10.10.10.11:8": "n9:2", "10.10.10.12:8": "n10:2", "-np 16": "-np 4"}
    )
    path = {"PATH": OPENMPI_4.install(bare, folder)}
    done = bare.run(["bash"], host="n9", env=PLAIN | path, cwd=folder, input=script)
    assert done.returncode == 0, done.stderr
    assert "HPC001 2 nodes x 2 tasks, Open MPI " in done.stderr
    check_fall(losses(done.stdout))


def test_resnet_typed_on_each_machine(bare: Cluster, folder: Path) -> None:
    """As a user has it: BatchNorm, and the learning rate by world size."""
    page = job_script("Two machines", "resnet50_ddp.py")
    small = {"--nproc_per_node=8": "--nproc_per_node=1", "10.10.10.11": "10.20.0.1"}
    programs = []
    for rank, host in enumerate(("n9", "n10")):
        mine = small | {"--node_rank=0": f"--node_rank={rank}"}
        script = ["bash", "-c", page.smaller(BATCHNORM, mine)]
        programs.append(bare.popen(script, host=host, env=PLAIN, cwd=folder))
    outputs = [program.communicate(timeout=120) for program in programs]
    assert [program.returncode for program in programs] == [0, 0], outputs
    check_fall(losses(outputs[0][0]))
    assert outputs[1][0] == ""  # rank 0 alone prints
