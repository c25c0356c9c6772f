"""The examples, by the job scripts of docs/run.md, small.

Where normalisation and learning rate are fixed, the losses are those of one worker,
whatever the number of workers, and also if the job was killed and submitted again.
"""

from __future__ import annotations

import json
import re
import sys

import pytest

from tests.support import ROOT
from tests.support.cluster.commands import FORMS, JUELICH, ONE_TASK, require_package
from tests.support.cluster.mpi import MPICH_4, OPENMPI_4, type_on_each
from tests.support.pages.job_scripts import job_script, pbs_resources
from tests.support.patience import until
from tests.support.stock.trainings import alone

IMAGES = "--image-size 32 --log-every 1 --train-num-workers 0"
# Steps of 8 images on all workers together: --batch-size is 8 / number of workers.
RESNET = f"{IMAGES} --images 32 --epochs 2 --norm group --fixed-lr --lr 0.003"
AS_USERS = f"{IMAGES} --images 16 --epochs 3 --batch-size 4"
FSDP = "--size tiny --length 32 --global-batch-size 8 --lr 0.001 --steps 120"
FSDP += " --log-every 20"

# No python of this environment: the scripts activate it. One thread, for workers that
# share two cores.
PLAIN = {"OMP_NUM_THREADS": "1"}
SITE = PLAIN | {"SYSTEMNAME": JUELICH["SYSTEMNAME"]}
FORKS = PLAIN | FORMS["fork"]  # one import of torch for all of a node
ONE_IMPORT = SITE | FORKS

# Options of sbatch count more than those in the script.
SMALL = ("--nodes=2", "--partition=batch", "--gres=gpu:2", "--cpus-per-task=1")
TWO_WORKERS = {"--nproc_per_node=gpu": "--nproc_per_node=2"}
ONE_WORKER = {"--nproc_per_node=gpu": "--nproc_per_node=1"}


def losses(output):
    """Return the losses that were printed, by epoch and images, or by step."""
    epochs = re.findall(r"^epoch (\d+)(?:, (\d+) of \d+ images)?: loss (\S+?),?(?: |$)",
                        output, re.MULTILINE)  # fmt: skip
    found: dict[tuple[int, ...], float] = {
        (int(e), int(images or 0)): float(loss) for e, images, loss in epochs
    }
    steps = re.findall(r"^step (\d+): loss (\S+),", output, re.MULTILINE)
    found |= {(int(step),): float(loss) for step, loss in steps}
    assert found, output
    return found


def check_fall(found):
    """The last loss is well below the first."""
    values = list(found.values())
    assert values[-1] < 0.9 * values[0], found


def check_begin(found, reference):
    """The losses are those of the reference, up to rounding, as long as it lasted."""
    common = [when for when in reference if when in found]
    assert min(found) == min(reference)
    assert [found[when] for when in common] == pytest.approx(
        [reference[when] for when in common], rel=1e-3
    )


def check_end(found, reference):
    """The losses are those of the reference, from a later step on to the end."""
    wanted = {when: reference[when] for when in reference if when >= min(found)}
    assert 0 < len(wanted) < len(reference)
    assert found == pytest.approx(wanted, rel=1e-3)


def first_epoch(found):
    """Return the losses of a training of one epoch."""
    return {when: loss for when, loss in found.items() if when[0] == 0}


@pytest.fixture(scope="module")
def resnet():
    """Return the losses of one worker."""
    require_package("torchvision")
    output = alone("resnet50_ddp.py", *f"{RESNET} --batch-size 8".split())
    assert "25,557,032 parameters\n" in output
    check_fall(losses(output))
    return losses(output)


@pytest.fixture(scope="module")
def fsdp():
    """Return the losses of one worker."""
    found = losses(alone("fsdp.py", *FSDP.split()))
    check_fall(found)
    return found


@pytest.fixture
def folder(tmp_path):
    """Make a folder with what a user has in it: the examples, and an environment."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    (tmp_path / ".venv").symlink_to(sys.prefix)
    return tmp_path


def wait_for(job, pattern):
    """Wait until a job has written a line."""

    def output():
        return "".join(job.outputs)

    until(lambda: re.search(pattern, output(), re.MULTILINE), output)


def signal_to(cluster, job, name):
    """Send a signal to a job's steps, as ``#SBATCH --signal`` does."""
    cluster.run(["scancel", f"--signal={name}", job.job], check=True)


# --- one process ----------------------------------------------------------------------


def test_each_epoch_has_another_order():
    """Without learning, a loss says which images are in the batch."""
    require_package("torchvision")
    words = f"{RESNET} --batch-size 8 --images 16 --lr 0".split()
    found = losses(alone("resnet50_ddp.py", *words))
    first, second = ([found[epoch, seen] for seen in (8, 16)] for epoch in (0, 1))
    assert first != pytest.approx(second, rel=1e-3)
    assert sum(first) == pytest.approx(sum(second), rel=1e-3)


def test_fsdp_in_half_precision(fsdp):
    found = losses(alone("fsdp.py", *FSDP.split(), "--steps=20", "--precision=bf16"))
    assert found == pytest.approx({(20,): fsdp[20,]}, rel=0.01)


# --- Slurm ----------------------------------------------------------------------------


def test_resnet_is_killed_and_submitted_again(juelich, resnet, folder):
    page = job_script("Jülich", "resnet50_ddp.py")
    endless = page.smaller(f"{RESNET} --batch-size 4 --epochs 1000", ONE_WORKER)
    first = juelich.submit(endless, *SMALL, env=ONE_IMPORT, cwd=folder)
    wait_for(first, "^epoch 1, 8 of 32 images")
    signal_to(juelich, first, "USR1")
    wait_for(first, "^checkpoint: epoch 1, (8|16|24) images$")
    signal_to(juelich, first, "KILL")
    done = juelich.wait(first)
    assert done.returncode != 0, done.output
    check_begin(losses(done.output), resnet)

    script = page.smaller(f"{RESNET} --batch-size 4", ONE_WORKER)
    again = juelich.sbatch(script, *SMALL, env=ONE_IMPORT, cwd=folder)
    assert again.returncode == 0, again.output
    assert re.search("^resumed: epoch 1, (8|16|24) images$", again.output, re.MULTILINE)
    check_end(losses(again.output), resnet)


def test_fsdp_is_killed_and_submitted_again_with_fewer_workers(juelich, fsdp, folder):
    page = job_script("Jülich", "fsdp.py")
    endless = page.smaller(f"{FSDP} --steps 1000000 --save-every 60", TWO_WORKERS)
    env = ONE_IMPORT | {"SCRATCH": str(folder)}
    first = juelich.submit(endless, *SMALL, env=env, cwd=folder)
    wait_for(first, "^checkpoint: step 60$")
    signal_to(juelich, first, "KILL")
    done = juelich.wait(first)
    assert done.returncode != 0, done.output
    assert "(between_nodes=2, within_node=2)" in done.output
    check_begin(losses(done.output), fsdp)

    script = page.smaller(FSDP, TWO_WORKERS)
    again = juelich.sbatch(script, *SMALL, "--nodes=1", env=env, cwd=folder)
    assert again.returncode == 0, again.output
    assert "resumed: step 60\n" in again.output
    assert "(between_nodes=1, within_node=2)" in again.output
    check_end(losses(again.output), fsdp)


def test_resnet_with_agents(juelich, resnet, folder):
    page = job_script("Dresden", "resnet50_ddp.py")
    script = page.smaller(f"{RESNET} --batch-size 4 --epochs 1", ONE_WORKER)
    done = juelich.sbatch(script, *SMALL, env=ONE_IMPORT, cwd=folder)
    assert done.returncode == 0, done.output
    assert losses(done.output) == pytest.approx(first_epoch(resnet), rel=1e-3)


def test_resnet_each_task_a_worker(juelich, resnet, folder):
    short = f"{RESNET} --batch-size 2 --epochs 1"
    script = job_script("ThaiSC", "resnet50_ddp.py").smaller(short)
    tasks = "--ntasks-per-node=2"
    done = juelich.sbatch(script, *SMALL, tasks, env=SITE, cwd=folder)
    assert done.returncode == 0, done.output
    assert losses(done.output) == pytest.approx(first_epoch(resnet), rel=1e-3)
    # Over the fast network, and torch warns of nothing.
    other = "^(?!epoch|checkpoint|finished|.* parameters$).+$"
    (line,) = re.findall(other, done.output, re.MULTILINE)
    assert "2 nodes x 2 tasks; " in line
    assert line.endswith("over ib0; site jsc")


def test_lightning(juelich, folder):
    require_package("lightning")
    script = job_script("Dresden", "lightning_ddp.py").text
    done = juelich.sbatch(
        script, *SMALL, "--ntasks=2", "--mincpus=1", env=ONE_IMPORT, cwd=folder
    )
    assert done.returncode == 0, done.output
    assert "Starting with 2 processes" in done.output
    check_fall(losses(done.output))


def test_tensorflow(juelich):
    """Each process tells TensorFlow all nodes, by names that reach each other."""
    program = ROOT / "examples/tensorflow/tf_config.py"
    done = juelich.srun("-N2", ONE_TASK, "python", program, env=JUELICH)
    assert done.returncode == 0, done.stderr
    seen = [json.loads(line) for line in done.stdout.splitlines()]
    tasks = sorted((config["task"]["type"], config["task"]["index"]) for config in seen)
    assert tasks == [("worker", 0), ("worker", 1)]
    (workers,) = {tuple(config["cluster"]["worker"]) for config in seen}
    (port,) = {worker.partition(":")[2] for worker in workers}
    assert 20000 <= int(port) < 29000
    assert workers == tuple(f"{name}i:{port}" for name in juelich.names[:2])


def test_tensorflow_needs_one_task_on_each_node(juelich):
    program = ROOT / "examples/tensorflow/tf_config.py"
    done = juelich.srun("-N2", "-n4", "python", program, env=JUELICH)
    assert done.returncode == 1, done.stderr
    assert done.stdout == ""
    assert "start it with: srun --ntasks-per-node=1 python" in done.stderr


# --- PBS, and no scheduler ------------------------------------------------------------


def test_fsdp_by_the_launch_line_of_pbs(bare, fsdp, folder):
    """MPICH stands in for HPE Cray PALS; it binds nothing."""
    page = job_script("NCAR", "fsdp.py")
    _, resources = pbs_resources(page.text)
    hosts = [host for host in ("n9", "n10") for _ in range(resources["mpiprocs"])]
    (folder / "nodes").write_text("".join(f"{host}\n" for host in hosts))
    script = page.smaller(FSDP, ONE_WORKER | {"--cpu-bind none ": ""})
    pbs = {
        "PBS_JOBID": "7.desched1",
        "PBS_NODEFILE": str(folder / "nodes"),
        "PBS_O_WORKDIR": str(folder),
        "PBS_ENVIRONMENT": "PBS_BATCH",
        "NCAR_HOST": "derecho",
        "SCRATCH": str(folder),
    }
    path = {"PATH": MPICH_4.install(bare, folder)}
    done = bare.run(["bash"], host="n9", env=FORKS | pbs | path, input=script)
    assert done.returncode == 0, done.stderr
    assert "2 nodes, 1 worker here; Hydra in PBS 7." in done.stderr
    assert "site derecho" in done.stderr
    assert "DeviceMesh((all=2)" in done.stdout
    assert losses(done.stdout) == pytest.approx(fsdp, rel=1e-3)


def test_accelerate_by_mpirun(bare, folder):
    require_package("accelerate")
    page = job_script("Two machines", "accelerate_ddp.py")
    small = {"10.10.10.11:8": "n9:2", "10.10.10.12:8": "n10:2", "-np 16": "-np 4"}
    script = page.smaller("", small)
    path = {"PATH": OPENMPI_4.install(bare, folder)}
    done = bare.run(["bash"], host="n9", env=PLAIN | path, cwd=folder, input=script)
    assert done.returncode == 0, done.stderr
    assert "2 nodes x 2 tasks; Open MPI " in done.stderr
    assert len(done.stdout.splitlines()) == 5  # or each would train alone
    check_fall(losses(done.stdout))


def test_resnet_typed_on_each_machine(bare, folder):
    """As users have it: BatchNorm, and the learning rate by world size."""
    require_package("torchvision")
    page = job_script("Two machines", "resnet50_ddp.py")
    small = {"--nproc_per_node=8": "--nproc_per_node=1", "10.10.10.11": "10.20.0.1"}
    script = page.smaller(AS_USERS, small)
    (first, second), _ = type_on_each(bare, script, env=FORKS, cwd=folder)
    check_fall(losses(first))
    assert second == ""  # rank 0 alone prints
    # From that of one worker on, by a fifth of one worker's rate in each epoch.
    rates = re.findall("learning rate ([0-9.]+)", first)
    assert rates == ["0.0250", "0.0275", "0.0300", "0.0325", "0.0350", "0.0375"]
