"""All detectors together: which of them wins, and that none of them ever crashes."""

from __future__ import annotations

import re
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support import ROOT
from tests.support.detection import changed, detected, outcome
from tests.support.launch_examples import examples, launch, module_of
from tests.support.recordings import BY_SLURM, recorded, recordings
from torchrun_hpc import schedulers
from torchrun_hpc.preflight import of_process
from torchrun_hpc.reporting.console import is_reporter
from torchrun_hpc.schedulers import pbs, slurm
from torchrun_hpc.schedulers.job import LaunchContext, Task
from torchrun_hpc.schedulers.pmi import Exchanged
from torchrun_hpc.schedulers.process import Process

# --- who wins -----------------------------------------------------------------------


def started_by(name, detector, example):
    """Return the first task of a launch, or the script."""
    if detector.task_layout:
        return launch(name, [0, 1])[0]
    (environ, hostname), *_ = example.tasks
    return Process(environ, hostname, read=example.files.get)


# By its first example, in this order: whoever started this process, not whoever
# started that.
STARTED_BY = {
    detector: started_by(name, detector, example)
    for name, (detector, example) in reversed(examples().items())
}
STARTED_BY = {detector: STARTED_BY[detector] for detector in schedulers.DETECTORS}
# Two launchers that have daemons, and two schedulers, are decided by evidence:
# test_evidence.py.
PAIRS = [
    (inner, outer)
    for inner, outer in combinations(STARTED_BY, 2)
    if not (
        inner.daemons and outer.daemons and bool(inner.detect) is bool(outer.detect)
    )
]


@pytest.mark.parametrize("detector", STARTED_BY, ids=lambda d: d.name)
def test_each_alone(detector):
    assert detected(STARTED_BY[detector]).scheduler == detector.name


def test_two_at_once():
    for inner, outer in PAIRS:
        environ = STARTED_BY[outer].environ | STARTED_BY[inner].environ
        job = detected(Process(environ, "jwb0001"))
        is_in_job = inner.task_layout and outer.detect
        expected = f"{inner.name} in {outer.name}" if is_in_job else inner.name
        assert job.scheduler == expected, (inner.name, outer.name)
        assert schedulers.task_rank(environ) == 0, (inner.name, outer.name)


@pytest.mark.parametrize("hostname", ["laptop", "", "localhost"])
def test_nobody(hostname):
    environ = {"HOME": "/root", "PATH": "/usr/bin", "OMP_NUM_THREADS": "1"}
    assert outcome(Process(environ, hostname)) is None
    assert schedulers.task_rank(environ) is None
    assert is_reporter(of_process(Process(environ, hostname)).task_rank or 0)


def test_ranks_of_the_tasks_of_every_recorded_launch():
    # Outside a step there is no rank; PBS numbers hosts, not tasks.
    others = {
        "pbs-pbsdsh-split-chunks": [0, 0, 1],
        "slurm-salloc-shell": [None],
        "slurm-sbatch-script": [None],
    }
    for name in recordings(""):
        ranks = [schedulers.task_rank(environ) for environ, _ in recorded(name)]
        assert ranks == others.get(name, [*range(len(ranks))]), name


# --- what the scheduler promises ------------------------------------------------------

SLURMS = {"SLURM_JOB_ID": "19", "SLURM_GPUS_ON_NODE": "4"}
PBSS = {"PBS_JOBID": "7.server", "NCPUS": "64", "SLURM_GPUS_ON_NODE": "4"}


@pytest.mark.parametrize(
    "around", [{}, *(p.environ for d, p in STARTED_BY.items() if d.task_layout)]
)
@pytest.mark.parametrize(
    ("scheduler", "number", "gpus", "threads"),
    [(SLURMS, "19", 4, ""), (PBSS, "7.server", 0, "64"), ({}, "", 0, "")],
)
def test_a_promise_is_the_schedulers(around, scheduler, number, gpus, threads):
    """Whoever started this process, if anyone did."""
    environ = around | scheduler
    process = Process(environ, "jwb0001")
    found = schedulers.promise(schedulers.weigh(process))
    assert (found.gpus_on_node.value, found.threads.value) == (gpus, threads)
    assert schedulers.job_number(environ) == number
    seen = of_process(process)
    assert (seen.promise, seen.task_rank) == (
        found,
        0 if "RANK" in str(around) else None,
    )


# --- anything -----------------------------------------------------------------------


def variables_of(module):
    """Return the names of the variables that a module reads: its constants."""
    found = set()
    for name, value in vars(module).items():
        if name.isupper() and isinstance(value, (str, tuple)):
            found |= {value} if isinstance(value, str) else {*value}
    return sorted(text for text in found if re.fullmatch(r"[A-Z][A-Z0-9_]{2,}", text))


FAMILIES = [variables_of(module_of(each)) for each in schedulers.DETECTORS]
READ = sorted({name for family in FAMILIES for name in family})


@pytest.mark.parametrize("detector", schedulers.DETECTORS, ids=lambda d: d.name)
def test_each_is_in_the_documentation(detector):
    page = (ROOT / "docs" / "internals.md").read_text("utf-8")
    assert f"`{detector.markers[0]}`" in page


FILE = "/var/spool/pbs/aux/17[3].server"
small = st.integers(0, 6).map(str)
odd = st.one_of(
    st.sampled_from(
        [
            *(
                "",
                " ",
                "-1",
                "1.0",
                "0x1",
                "00",
                "\u0663",
                "\u00bd",
                "65537",
                "9" * 400,
            ),
            *("jwb[0001-", "n[1-9999]", "-5"),
            *("jwb0001", "jwb[0001-0003]", "1(x3)", "2(x2),1", "jwb0001 2 jwb0002 1"),
            *("jwb0001 jwb0001 jwb0002", "17[3].server", "17[].server", FILE, "."),
            *("00000002", "PBS_INTERACTIVE", "-6", "4294967290", "\u0192D2e73NP"),
            *("prterun-jwb0001-8511@1", "1.0;tcp://10.10.0.1,fd00::1:43695", "a.0;b"),
            "1.0;tcp6://[fd00::2]:59375",
        ]
    ),
    st.text(st.characters(exclude_characters="\0", codec="utf-8"), max_size=12),
)
values = small | small | odd
files = st.dictionaries(
    st.sampled_from([FILE, "1", "jwb0001", pbs.USUAL_FILE.format("1")]),
    st.sampled_from(["", "jwb0001\njwb0002\njwb0001\n", "jwb0002\n\n \n", " \n"])
    | st.text(max_size=12),
)
hostnames = st.sampled_from(["jwb0001", "jwb0002.site", "login01", ""])


def family(names):
    """Return environments that have all variables of a family, or most of them."""
    return st.fixed_dictionaries({}, optional=dict.fromkeys(names, values)) | (
        st.fixed_dictionaries(dict.fromkeys(names, small))
    )


families = st.lists(st.sampled_from([*map(family, FAMILIES)]), max_size=3)
any_of_them = st.dictionaries(st.sampled_from(READ), values, max_size=3)


@st.composite
def environments(draw):
    """Variables of one launcher, or several, in a job, or none; and a host."""
    environ: dict[str, str] = {}
    for one_family in draw(families):
        environ |= draw(one_family)
    environ |= draw(any_of_them)
    return environ, draw(hostnames)


names = st.sampled_from(READ) | st.sampled_from(variables_of(slurm))
mutations = st.lists(
    st.tuples(st.just("set"), names, values | st.none())
    | st.tuples(st.just("swap"), names, names)
    | st.tuples(st.just("cut"), names, st.integers(0, 12)),
    max_size=4,
)


launches = st.sampled_from(recordings("")) | st.sampled_from(BY_SLURM)
tasks = launches.flatmap(lambda name: st.sampled_from(recorded(name)))


@st.composite
def mutated_recordings(draw):
    """An environment that was recorded, half of them Slurm's, and a few accidents."""
    environ, hostname = draw(tasks)
    for kind, name, other in draw(mutations):
        if kind == "set":
            changes = {name: other}
        elif kind == "swap":
            changes = {name: environ.get(other), other: environ.get(name)}
        else:
            changes = {name: environ.get(name, "")[:other]}
        environ = changed(environ, changes)
    return environ, draw(st.just(hostname) | hostnames)


def exchanging(answer):
    """Return a process manager that says this, as far as there are so many tasks."""

    def exchange(environ):
        if answer is None or not environ.get("PMI_SIZE", "").isdecimal():
            return None
        size = int(environ["PMI_SIZE"])
        places = answer.node_of_rank[:size] if len(answer.node_of_rank) >= size else ()
        hosts = answer.hosts[: max(places, default=-1) + 1]
        return Exchanged(answer.first_host, answer.instance, places, hosts)

    return exchange


PAGE = (ROOT / "docs" / "messages.md").read_text("utf-8")
SECTION = re.split("^## ", PAGE.partition("\n## Scheduler\n")[2], flags=re.MULTILINE)
CODES = set(re.findall("^### (HPC[0-9]{3}):", SECTION[0], re.MULTILINE))

answers = st.sampled_from(
    [
        None,
        Exchanged("jwb0001", "0badcafe"),
        Exchanged("jwb0001", "0badcafe", (0, 0, 1, 1, 2, 3, 3)),
        Exchanged("jwb0001", "0badcafe", (0, 1, 2, 0, 1, 2, 0)),
        Exchanged("jwb0001", "0badcafe", (0, 1, 0, 2), ("jwb0001", "jwb0003", "x")),
        Exchanged("x", "0badcafe", (0, 1, 2), ("", "jwb0001", "jwb0001")),
    ]
)


def assert_sound(job):
    is_shell = job.context is LaunchContext.ALLOCATION_SHELL
    if job.scheduler == "Slurm":
        assert all(job.nodes)
        assert (job.node_rank is None) is is_shell
    assert re.fullmatch("[A-Za-z0-9._-]+", job.launch_id)
    assert 1 <= len(job.nodes) <= job.allocated_nodes
    known = [name for name in job.nodes if name]
    assert len(set(known)) == len(known) in {0, 1, len(job.nodes)}
    task = job.task
    assert 0 <= task.rank < task.size
    assert 0 <= task.local_rank < task.local_size <= task.size
    if job.context is LaunchContext.STEP:
        assert len(job.nodes) <= task.size
    else:
        assert task == Task()
    if job.node_rank is None:
        assert is_shell or job.context is LaunchContext.BATCH_SCRIPT
        assert is_shell or len(job.nodes) == 1
    else:
        assert 0 <= job.node_rank < len(job.nodes)
    assert {"nodes", "launch_id"} <= set(job.provenance)
    if job.context is LaunchContext.STEP:
        assert {"nodes", "launch_id", "node_rank", "tasks", "task"} <= set(
            job.provenance
        )
    assert all(job.head_candidates)
    line = job.once_per_node("python -m torchrun_hpc train.py")
    assert line.startswith(job.launcher.template.partition(" ")[0])
    assert "{" not in line


@settings(max_examples=2600, deadline=None)
@given(
    environments() | mutated_recordings(),
    files,
    answers,
    st.sampled_from([(), ("slurmstepd",), ("sh", "pbs_mom"), ("res",), ("orted", "x")]),
    st.booleans(),
)
def test_any_environment_is_understood_or_refused(
    seen, texts, answer, ancestors, terminal
):
    environ, hostname = seen
    before = dict(environ)
    found = outcome(
        Process(
            environ,
            hostname,
            terminal=terminal,
            pid=1,
            ancestors=ancestors,
            read=texts.get,
            exchange=exchanging(answer),
        )
    )
    assert environ == before
    assert (schedulers.task_rank(environ) or 0) >= 0
    if isinstance(found, str):
        assert found.isprintable()
        assert found.partition(" ")[0] in CODES
        if {d.name for d in schedulers.DETECTORS if d.is_set(environ)} == {"Slurm"}:
            assert re.match("HPC0[23][0-9] .*SLURM", found)
    elif found is not None:
        assert_sound(found)
