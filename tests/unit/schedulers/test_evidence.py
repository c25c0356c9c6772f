"""Variables that another job has left: removed by evidence, or refused by name."""

from __future__ import annotations

import os
import socket
from dataclasses import replace
from typing import Any, NamedTuple

import pytest

from tests.support.detection import detected, outcome, refusal
from tests.support.launch_examples import batches, examples, kinds, launch
from tests.support.recordings import recorded
from torchrun_hpc import schedulers
from torchrun_hpc.agent.inputs import inputs_of
from torchrun_hpc.options.options import Options
from torchrun_hpc.planning.mode import direct_mode
from torchrun_hpc.preflight import of_process, preflight
from torchrun_hpc.schedulers.process import Process, this_process
from torchrun_hpc.sites.__main__ import main

EACH = [0, 1, 2]


class Real(NamedTuple):
    """A job without leftovers: for each task its variables and its host."""

    tasks: list[tuple[dict[str, str], str]]
    ancestors: tuple[str, ...]  # of a task, the nearest first
    family: str  # whose variables those are


BATCHES = batches()
JOBS = {
    name: Real(batch.tasks, batch.ancestors, detector.name)
    for name, (detector, batch) in BATCHES.items()
}
FILES = {k: v for _, batch in BATCHES.values() for k, v in batch.files.items()}
((LSF, _),) = JOBS["bsub"].tasks
BY_JSRUN = {**launch("jsrun", [0], LSF)[0].environ}
IN_SBATCH, IN_QSUB = JOBS["sbatch"].ancestors, JOBS["qsub"].ancestors
# mpirun inside a job.
MPIRUN = {
    "jsrun": Real([(BY_JSRUN, "hostB")], ("jsmd",), "LSF"),
    "Open MPI in Slurm": Real(
        recorded("slurm-openmpi-4-ppr"), ("orted", *IN_SBATCH), "Slurm"
    ),
    "Open MPI 5 in Slurm": Real(
        recorded("slurm-openmpi-5"), ("sh", "prterun", *IN_SBATCH), "Slurm"
    ),
    "Hydra in Slurm": Real(
        recorded("slurm-mpich-4"), ("hydra_pmi_proxy", "slurmstepd"), "Slurm"
    ),
    "Open MPI in PBS": Real(
        recorded("pbs-openmpi-4.1.4-tm"), ("python", "mpirun.openmpi", *IN_QSUB), "PBS"
    ),
    "Hydra in PBS": Real(
        recorded("pbs-mpich-4.0.2"),
        ("hydra_pmi_proxy", "mpiexec.hydra", *IN_QSUB),
        "PBS",
    ),
}
PREFIXES = {d.name: d.prefixes[0] for d in schedulers.DETECTORS if d.detect}
LEFT = {
    family: [name for name, (d, b) in BATCHES.items() if d.name == family and b.is_left]
    for family in PREFIXES
}
PAIRS = [
    (real, left)
    for real, job in (JOBS | MPIRUN).items()
    for family, names in LEFT.items()
    if family != job.family
    for left in names
]


def found(job, left, **about: Any):
    """Return what every task finds, with what is left over besides."""
    about = {"read": FILES.get} | about
    return [
        outcome(replace(Process({**left, **environ}, hostname), **about))
        for environ, hostname in job.tasks
    ]


def left_by(name):
    """Return the variables of the last task of a job, on another host."""
    environ, _ = JOBS[name].tasks[-1]
    return environ


@pytest.mark.parametrize("real", JOBS | MPIRUN)
def test_whose_job_this_is(real):
    job = (JOBS | MPIRUN)[real]
    above = {"ancestors": job.ancestors}
    alone = found(job, {}, **above)
    assert not [text for text in alone if isinstance(text, str)]
    # mpirun in a job is no contradiction, also where nothing is seen of either.
    for ancestors in (), ("bash", "sshd", "systemd"):
        assert found(job, {}, ancestors=ancestors) == alone
    for left in (left for one, left in PAIRS if one == real):
        # The process above shows it, wherever the names of hosts are of no help.
        assert found(job, left_by(left), **above) == alone, left
        # In a container with process numbers of its own the host shows it.
        if real != "salloc":
            assert found(job, left_by(left)) == alone, left


BOTH = "HPC142 the variables of both "
IN_ALL_FILES = dict.fromkeys(FILES, "batch\ndec0001\n")
UNCLEAR: dict[str, dict[str, Any]] = {
    "no host of either": {"hostname": "elsewhere"},
    "a host of both": {"hostname": "dec0001", "read": IN_ALL_FILES.get},
    "no file that can be read": {
        "hostname": "dec0001", "read": {}.get, "may_be_renamed": True
    },
}  # fmt: skip


@pytest.mark.parametrize("case", UNCLEAR)
def test_what_nothing_decides_is_refused_by_name(case):
    """The order of the detectors never decides."""
    for real, left in PAIRS:
        job, others = (JOBS | MPIRUN)[real], left_by(left)
        if case == "a host of both":
            others = others | BATCHES[left][1].on_dec0001
            own = next(b for d, b in BATCHES.values() if d.name == job.family)
            tasks = [(environ | own.on_dec0001, host) for environ, host in job.tasks]
            job = job._replace(tasks=tasks)
        for text in found(job, others, **UNCLEAR[case]):
            assert str(text).startswith(BOTH), (real, left)
            assert job.family in text, (real, left)
            assert f"unset ${{!{PREFIXES[job.family]}*}}" in text, (real, left)
            assert text.isprintable(), (real, left)


ON_OTHER_NODES = {
    "MPICH over ssh": ("hydra_pmi_proxy", "sshd", "systemd"),
    "PALS": ("palsd", "systemd"),
    "nothing shows": (),
}


@pytest.mark.parametrize("launcher", ON_OTHER_NODES)
@pytest.mark.parametrize("left", LEFT["Slurm"])
def test_a_list_that_lacks_this_host_is_left_over(left, launcher):
    """PBS writes its node file on the first host only."""
    ancestors = ON_OTHER_NODES[launcher]
    job = JOBS["qsub"] if launcher == "PALS" else MPIRUN["Hydra in PBS"]
    extra = launch("PALS", EACH)[1].environ if launcher == "PALS" else {}
    tasks = [({**extra, **environ}, "dec0009") for environ, _ in job.tasks[-2:]]
    others = job._replace(tasks=tasks)
    about = {"ancestors": ancestors, "read": {}.get}
    alone = found(others, {}, **about)
    assert not [text for text in alone if isinstance(text, str)]
    assert found(others, left_by(left), **about) == alone
    # A container's own name is in no list.
    if launcher == "nothing shows":
        for text in found(others, left_by(left), may_be_renamed=True, **about):
            assert str(text).startswith(BOTH)


@pytest.mark.parametrize(
    ("number", "is_one"), [("", True), (".desched1", True), ("0.desched1", False)]
)
def test_a_prolog_sets_the_variables_of_pbs_for_a_job_of_slurm(number, is_one):
    """In a container, where no process above shows: one job, of one number."""
    for real in "srun", "sbatch", "an array":
        for environ, hostname in JOBS[real].tasks:
            job_id = environ["SLURM_JOB_ID"] + number
            file = f"/var/spool/pbs/aux/{job_id}"
            pbs = {"PBS_JOBID": job_id, "PBS_NODEFILE": file}
            read = {file: f"{hostname}\n"}.get
            process = Process(pbs | environ, hostname, read=read)
            if is_one:
                assert outcome(process) == outcome(Process(environ, hostname)), real
                continue
            text = refusal(process)
            assert text.startswith("HPC142 "), real
            assert "a node of several of them" in text, real


# --- what mpirun has left -----------------------------------------------------------

DAEMONS = {kind: one for kind, one in kinds().items() if one.ancestors}


def in_third_task(kind):
    """Return the variables of mpirun in a task of three, without Slurm's."""
    name = DAEMONS[kind].recording
    environ = recorded(name)[2][0] if name else launch(kind, EACH)[2].environ
    return {k: v for k, v in environ.items() if not k.startswith("SLURM")}


TASKS = {kind: in_third_task(kind) for kind in DAEMONS}


@pytest.mark.parametrize("left", TASKS)
def test_a_job_that_was_submitted_in_a_task_of_mpirun(left):
    for real, job in JOBS.items():
        above = job.ancestors
        alone = found(job, {}, ancestors=above)
        assert found(job, TASKS[left], ancestors=above) == alone, real
        for environ, hostname in job.tasks:
            cleaned = Process(environ, hostname, ancestors=above)
            process = replace(cleaned, environ=TASKS[left] | environ)
            assert of_process(process).task_rank == of_process(cleaned).task_rank, real


# Its number, and names and numbers above it, where those of root are hidden.
# 7 is the process that Slurm itself started.
HIDDEN = {
    "started by Slurm": (7, (), ()),
    "in a batch script": (9, ("bash",), (7, 6)),
    "in a shell of it": (9, ("time", "sh", "bash"), (8, 81, 7, 6)),
    "hidden itself": (9, (), (7,)),
}


@pytest.mark.parametrize(("pid", "names", "pids"), HIDDEN.values(), ids=HIDDEN)
@pytest.mark.parametrize("left", TASKS)
def test_what_slurm_has_started_is_above_if_others_are_hidden(left, pid, names, pids):
    for real in "srun", "sbatch", "an array":
        for environ, hostname in JOBS[real].tasks:
            own = environ | {"SLURM_TASK_PID": "7"}
            process = Process(
                own, hostname, pid=pid, ancestors=names, ancestor_pids=pids
            )
            both = replace(process, environ=TASKS[left] | own)
            assert detected(both) == detected(process), real


@pytest.mark.parametrize(
    ("name", "ancestors"),
    [
        ("Open MPI in Slurm", ("mpirun", "bash")),
        ("Open MPI 5 in Slurm", ("sh", "prterun", "bash")),
        ("Hydra in Slurm", ("hydra_pmi_proxy", "mpiexec.hydra", "bash")),
    ],
)
def test_a_launcher_in_a_batch_script_is_nearer(name, ancestors):
    """The script is what Slurm has started; slurmstepd above is hidden."""
    environ, hostname = MPIRUN[name].tasks[0]
    pids = (*range(10, 10 - len(ancestors) + 1, -1), 7, 6)
    own = environ | {"SLURM_TASK_PID": "7"}
    process = Process(own, hostname, pid=11, ancestors=ancestors, ancestor_pids=pids)
    assert outcome(process) == outcome(Process(environ, hostname))


def test_what_is_weighed_stays_as_it_is():
    for real, left in PAIRS:
        if real == "salloc":
            continue
        environ, hostname = (JOBS | MPIRUN)[real].tasks[0]
        process = Process(left_by(left) | environ, hostname, read=FILES.get)
        weighed = schedulers.weigh(process)
        assert weighed.environ.items() < process.environ.items(), (real, left)
        assert schedulers.weigh(weighed) is weighed, (real, left)


TWO = [
    (inner, outer)
    for inner in TASKS
    for outer in TASKS
    if examples()[inner][0] is not examples()[outer][0]
]


def test_a_launcher_in_a_task_of_another():
    for inner, outer in TWO:
        environ = TASKS[outer] | TASKS[inner]
        process = Process(environ, "jwb0003", ancestors=DAEMONS[inner].ancestors)
        alone = detected(Process(TASKS[inner], "jwb0003"))
        assert detected(process).scheduler == alone.scheduler, (inner, outer)
        text = refusal(Process(environ, "jwb0003"))
        assert text.startswith(BOTH), (inner, outer)


# --- this process -------------------------------------------------------------------


@pytest.fixture
def with_leftovers(monkeypatch, tmp_path):
    """Put this process into a job of PBS that has the variables of Slurm's as well."""
    file = tmp_path / "nodes"
    file.write_text(f"{socket.gethostname()}\n", encoding="utf-8")
    left = left_by("srun") | {"SLURM_GPUS_ON_NODE": "8", "SLURM_CLUSTER_NAME": "lumi"}
    own = {"PBS_JOBID": "7.server", "PBS_NODEFILE": str(file), "PATH": "/usr/bin"}
    monkeypatch.setattr("os.environ", left | own)


@pytest.mark.usefixtures("with_leftovers")
def test_the_site_is_not_that_of_a_job_that_is_left_over(capsys):
    assert (main(["here"]), capsys.readouterr().out.split()[0]) == (1, "none")
    job = detected(this_process())
    inputs = inputs_of(direct_mode(job), preflight("COMMAND"), Options())
    assert (job.scheduler, inputs.site) == ("PBS", None)
    assert not [name for name in inputs.environ if name.startswith("SLURM")]


@pytest.mark.usefixtures("with_leftovers")
def test_all_variables_count_where_nothing_shows_which_are_left_over():
    for name in ("PBS_NODEFILE", "SLURM_JOB_NODELIST", "SLURM_NODELIST"):
        del os.environ[name]
    assert refusal(this_process()).startswith("HPC142 ")
    assert of_process(this_process()).environ == os.environ
