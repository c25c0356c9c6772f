"""The advice about CPUs and GPUs."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.support.juelich import (
    BATCH,
    COMMAND,
    INTERACTIVE,
    ONE_NODE_SCRIPT,
    ONE_NODE_STEP,
    STEP,
    step,
)
from tests.support.plans import (
    NODE,
    ONE_WORKER,
    make_inputs,
    make_plan,
    refused,
    values,
    visible,
)
from torchrun_hpc.errors import Setting
from torchrun_hpc.planning import resources
from torchrun_hpc.planning.inputs import Node
from torchrun_hpc.planning.workers import Binding, Share, Workers
from torchrun_hpc.schedulers import flux, hydra, jsrun, pals, slurm
from torchrun_hpc.schedulers.openmpi import MPIRUN
from torchrun_hpc.schedulers.pbs import ANY_MPIEXEC
from torchrun_hpc.variables import OMP


def advice(inputs, nodes):
    """Return what is said of workers that are not bound."""
    threads = resources.worker_threads(inputs, None)
    workers = Workers(inputs.node.workers, environment=threads)
    return resources.advice(inputs, workers, nodes)


# --- the launchers' lines -------------------------------------------------------------

LAUNCHERS = {
    "srun": (slurm.SRUN, "", "--cpus-per-task=2"),  # a number, which HPC092 only knows
    "mpirun": (MPIRUN, "--bind-to none", "--bind-to none"),
    "Hydra": (hydra.MPIEXEC, "-bind-to none", "-bind-to none"),
    "PALS": (pals.MPIEXEC, "--cpu-bind none", "--cpu-bind none"),
    "flux": (flux.RUN, "-o cpu-affinity=off", "-o cpu-affinity=off"),
    "jsrun": (jsrun.JSRUN, "--bind=none", "--bind=none"),
    "any mpiexec": (ANY_MPIEXEC, "$PBS_NODEFILE -x PBS_JOBID --bind-to none", ""),
}  # fmt: skip


@pytest.mark.parametrize(
    ("launcher", "everywhere", "when_told"), LAUNCHERS.values(), ids=LAUNCHERS
)
def test_who_types_what_a_message_tells_gets_all_cpus(launcher, everywhere, when_told):
    """One line, with the option once: no HPC092 follows, and it says the same line."""
    job = step(launcher=launcher)
    binding = re.compile("bind|affinity=|cpus-per-task")
    line = job.once_per_node(COMMAND)
    assert everywhere in line
    assert len(binding.findall(line)) == bool(everywhere)
    (message,) = said(make_inputs(job, node=ONE_CPU))
    assert message.startswith("HPC092 ")
    assert when_told in message
    told = message.partition("Give the task")[2]
    assert len(binding.findall(told)) == bool(when_told)


# --- threads ------------------------------------------------------------------------

AUTO = "--hpc_omp_threads=auto"
DEFAULT = "torchrun's default"

# The option, the workers, the CPUs; the variable's value and its source.
THREADS = {
    "default": (None, 4, 8, "1", DEFAULT),
    "default, one worker": (None, 1, 8, None, None),
    "default, fewer CPUs than workers": (None, 4, 2, "1", DEFAULT),
    "auto": ("auto", 4, 8, "2", f"{AUTO}: 8 CPUs / 4 workers"),
    "auto, one worker": ("auto", 1, 8, "8", f"{AUTO}: 8 CPUs / 1 worker"),
    "auto, with a rest": ("auto", 3, 8, "2", f"{AUTO}: 8 CPUs / 3 workers"),
    "auto, as many": ("auto", 8, 8, "1", f"{AUTO}: 8 CPUs / 8 workers"),
    "auto, fewer CPUs": ("auto", 4, 2, "1", f"{AUTO}: 2 CPUs / 4 workers"),
    "number": ("3", 4, 12, "3", "--hpc_omp_threads"),
    "number, one worker": ("3", 1, 12, "3", "--hpc_omp_threads"),
    "number, more than there are": ("999999", 4, 8, "999999", "--hpc_omp_threads"),
}


def threads(text):
    return {} if text is None else {"hpc_omp_threads": text}


def worker_threads(text, workers, cpus, environ=None):
    inputs = make_inputs(
        options=threads(text), environ=environ or {}, node=Node(workers, cpus=cpus)
    )
    return resources.worker_threads(inputs, None)


@pytest.mark.parametrize(
    ("text", "workers", "cpus", "value", "source"), THREADS.values(), ids=THREADS
)
def test_threads_of_a_worker(text, workers, cpus, value, source):
    expected = {} if value is None else {OMP: Setting(value, source)}
    for environ in {}, {OMP: ""}:
        assert worker_threads(text, workers, cpus, environ) == expected, environ
    for is_set in "1", "16", "4,2", "nonsense":
        assert worker_threads(text, workers, cpus, {OMP: is_set}) == {}, is_set


PBS = {"PBS_JOBID": "1.desched1"}
# Only the node of mpirun has the variables of PBS.
OVER_SSH = replace(STEP, nodelist_is_shared=False)


def of_pbs(ompthreads, ncpus=None):
    """Return the two variables that PBS sets to one number."""
    return {OMP: f"{ompthreads}", "NCPUS": f"{ncpus or ompthreads}"}


# The job, the option, workers and CPUs, PBS's variables, and what the workers get.
PBS_THREADS = {
    "ncpus": (STEP, None, Node(4, 64), of_pbs(64), "1"),
    "ncpus, one worker": (STEP, None, Node(1, 64), of_pbs(64), "64"),
    "ncpus, one worker that is bound": (STEP, None, Node(1, 16), of_pbs(64), "16"),
    "ompthreads": (STEP, None, Node(4, 64), of_pbs(16), "16"),
    "ompthreads that do not fit": (STEP, None, Node(4, 64), of_pbs(17), "1"),
    "one CPU": (STEP, None, Node(4, 64), of_pbs(1), "1"),
    "on one node only": (OVER_SSH, None, Node(4, 64), of_pbs(16), "1"),
    "on one node only, one worker": (OVER_SSH, None, Node(1, 8), of_pbs(4), "8"),
    "ompthreads, one worker": (STEP, None, Node(1, 8), of_pbs(4), "4"),
    "on the others": (OVER_SSH, None, Node(4, 64), {}, "1"),
    "auto": (STEP, "auto", Node(4, 64), of_pbs(64), "16"),
    "auto, one worker": (STEP, "auto", Node(1, 64), of_pbs(64), "64"),
    "number": (STEP, "3", Node(4, 64), of_pbs(64), "3"),
    "number, and ompthreads": (STEP, "3", Node(4, 64), of_pbs(16), "3"),
    "the user's": (STEP, None, Node(4, 64), of_pbs(8, 64), "8"),
    "the user's, on one node only": (OVER_SSH, None, Node(4, 64), of_pbs(8, 64), "8"),
}


@pytest.mark.parametrize(
    ("job", "text", "node", "variables", "expected"),
    PBS_THREADS.values(),
    ids=PBS_THREADS,
)
def test_threads_that_pbs_has_set(job, text, node, variables, expected):
    """The user has not set them, so they are no reason for a warning."""
    environ = PBS | variables
    inputs = make_inputs(job, options=threads(text), environ=environ, node=node)
    plan = values(resources.worker_threads(inputs, None))
    assert (variables | plan)[OMP] == expected
    assert advice(inputs, 3) == ()


@pytest.mark.parametrize(
    "environ",
    [PBS | of_pbs(65, 64), PBS | {OMP: "64"}, of_pbs(64)],  # the last is no job of PBS
)
def test_threads_that_pbs_has_not_set(environ):
    inputs = make_inputs(environ=environ, node=Node(4, cpus=64))
    assert resources.worker_threads(inputs, None) == {}
    assert [message.code for message in advice(inputs, 3)] == ["HPC094"]
    explicit = make_inputs(
        environ=environ, options=threads("auto"), node=Node(4, cpus=64)
    )
    assert [m.code for m in advice(explicit, 3)] == ["HPC093", "HPC094"]


@pytest.mark.parametrize("job", [None, STEP, INTERACTIVE, ONE_NODE_STEP])
def test_threads_of_every_plan(job):
    inputs = make_inputs(job, options=threads("auto"))
    assert make_plan(inputs).environment[OMP].value == "4"
    for environ in {}, {OMP: "2"}:  # also where it would be ignored
        wrong = make_inputs(job, options=threads("0"), environ=environ)
        refused("HPC014", "--hpc_omp_threads=0: use a number", make_plan, wrong)


# --- what is said -------------------------------------------------------------------


def said(inputs, nodes=3):
    """Return what is said, each as ``HPC... text``."""
    return [str(message) for message in advice(inputs, nodes)]


SRUN = "srun --nodes=3 --ntasks=3 --ntasks-per-node=1"
ONE_CPU = replace(NODE, cpus=1)
PROMISED = {"SLURM_CPUS_PER_TASK": "48"}
EXPLICIT_ONE = {"nproc_per_node": "1"}
FOUR = "0,1,2,3"


def gpus(**environ):
    """Return the environment of a node with four GPUs, as Slurm counts them."""
    return {"SLURM_GPUS_ON_NODE": "4", **environ}


def forgotten(cpus):
    return (
        f"HPC091 SLURM_CPUS_PER_TASK=48, but this process can use only {cpus}: srun "
        "22.05 to 23.02 does not read that variable. Add this before srun: export "
        "SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK"
    )


def shared(workers, cpus, remedy):
    return (
        f"HPC092 {workers} workers share {cpus}, the whole affinity mask of this "
        "process. "
        f"{remedy}"
    )


def too_many(*, threads, workers, fitting):
    named = "1 worker" if workers == 1 else f"{workers} workers"
    return (
        f"HPC094 OMP_NUM_THREADS={threads} times {named} is {threads * workers} "
        f"threads on 8 CPUs. Use fewer: export OMP_NUM_THREADS={fitting}"
    )


def hidden(name, value, visible):
    return (
        f"HPC095 {name}={value} shows {visible} of 4 GPUs (SLURM_GPUS_ON_NODE=4). "
        f"Show all of them: {SRUN} --gpu-bind=none env -u {name} {COMMAND}"
    )


def one_worker(shown, value):
    return (
        f"HPC097 one worker, the default, but {shown} shows 4 GPUs. Pass "
        f"--nproc_per_node={value}, or --nproc_per_node=1 for one worker"
    )


def fewer_gpus(shown):
    return f"HPC096 {shown}. Pass --nproc_per_node=gpu"


THREADS_IGNORED = (
    "HPC093 --hpc_omp_threads=auto is ignored: OMP_NUM_THREADS=4 is set. "
    "To use the option, unset it: unset OMP_NUM_THREADS"
)

SAID = {
    "srun has forgotten the CPUs": (
        make_inputs(environ=PROMISED, node=ONE_CPU),
        forgotten("1 CPU"),
    ),
    "srun has forgotten some of the CPUs": (
        make_inputs(environ=PROMISED | {"SRUN_CPUS_PER_TASK": ""}, node=Node(2, 47)),
        forgotten("47 CPUs"),
    ),
    "fewer CPUs than workers": (
        make_inputs(None, node=Node(4, 3)),
        shared(4, "3 CPUs", "Pass --nproc_per_node=3"),
    ),
    "threads by the option and the variable": (
        make_inputs(environ={OMP: "4"}, options=threads("auto")),
        THREADS_IGNORED,
    ),
    "too many threads": (
        make_inputs(environ={OMP: "5"}),
        too_many(threads=5, workers=2, fitting=4),
    ),
    "too many threads of one worker": (
        make_inputs(environ={OMP: "9"}, node=ONE_WORKER),
        too_many(threads=9, workers=1, fitting=8),
    ),
    "too many threads by the option": (
        make_inputs(options=threads("5")),
        too_many(threads=5, workers=2, fitting=4),
    ),
    "the variable with the fewest GPUs": (
        make_inputs(
            environ=gpus(CUDA_VISIBLE_DEVICES=FOUR, HIP_VISIBLE_DEVICES="0,1,2"),
            options=EXPLICIT_ONE,
            node=ONE_WORKER,
        ),
        hidden("HIP_VISIBLE_DEVICES", "0,1,2", 3),
    ),
    "fewer GPUs than workers": (
        make_inputs(environ=visible(CUDA="0"), node=replace(NODE, gpus=1)),
        fewer_gpus("2 workers, but CUDA_VISIBLE_DEVICES=0 shows 1 GPU"),
    ),
    "fewer GPUs than workers, as torch sees": (
        make_inputs(node=Node(4, 8, gpus=3)),
        fewer_gpus("4 workers, but this node shows 3 GPUs"),
    ),
    "one worker and four GPUs": (
        make_inputs(node=Node(1, 8, gpus=4)),
        one_worker("this node", "gpu"),
    ),
    "one worker and four GPUs, by Slurm": (
        make_inputs(environ=gpus(CUDA_VISIBLE_DEVICES=FOUR), node=ONE_WORKER),
        one_worker("CUDA_VISIBLE_DEVICES=0,1,2,3", 4),
    ),
}


@pytest.mark.parametrize(("inputs", "expected"), SAID.values(), ids=SAID)
def test_what_is_said(inputs, expected):
    assert said(inputs) == [expected]


TWO_CPUS = f"Give the task more CPUs: {SRUN} --cpus-per-task=2 {COMMAND}"
FEWER_WORKERS = "Pass --nproc_per_node=1"
NO_MORE = (
    "The job has 1 there (SLURM_JOB_CPUS_PER_NODE). Pass --cpus-per-task=2 to "
    "the command that made it (sbatch, salloc or srun), or pass --nproc_per_node=1"
)
BY_MPIRUN = (
    "Give the task more CPUs: mpirun -x PATH -np 3 --map-by ppr:1:node --hostfile "
    f"HOSTFILE --bind-to none {COMMAND}"
)
OF_THE_JOB = "SLURM_JOB_CPUS_PER_NODE"
WITH_HOST_FILE = replace(STEP, launcher=MPIRUN, host_file="HOSTFILE")
SHARED_CPU = {
    "in a step": (STEP, {}, TWO_CPUS),
    "in a batch script": (ONE_NODE_SCRIPT, {}, FEWER_WORKERS),
    "as asked for": (STEP, PROMISED | {"SRUN_CPUS_PER_TASK": "1"}, TWO_CPUS),
    "the job has no more": (STEP, {OF_THE_JOB: "2(x2),1"}, NO_MORE),
    "the job has as many": (STEP, {OF_THE_JOB: "2(x3)"}, TWO_CPUS),
    "the job's number is none": (STEP, {OF_THE_JOB: "many"}, TWO_CPUS),
    "mpirun": (WITH_HOST_FILE, {}, BY_MPIRUN),
    "pbsdsh": (step(launcher=ANY_MPIEXEC), {}, FEWER_WORKERS),
}


@pytest.mark.parametrize(
    ("job", "environ", "remedy"), SHARED_CPU.values(), ids=SHARED_CPU
)
def test_two_workers_share_a_cpu(job, environ, remedy):
    inputs = make_inputs(job, environ=environ, node=ONE_CPU)
    assert said(inputs) == [shared(2, "1 CPU", remedy)]


@pytest.mark.parametrize(
    ("name", "value", "workers", "shown"),
    [
        ("CUDA_VISIBLE_DEVICES", "0", 1, 1),
        ("CUDA_VISIBLE_DEVICES", "3", 2, 1),
        ("ROCR_VISIBLE_DEVICES", "0, 1", 1, 2),
        ("CUDA_VISIBLE_DEVICES", "2,-1,3", 1, 1),  # what follows one that is not valid
        ("ZE_AFFINITY_MASK", "0.0", 1, 1),  # tiles of Intel's
    ],
)
def test_some_of_four_gpus_are_visible(name, value, workers, shown):
    node = replace(NODE, workers=workers)
    found = said(make_inputs(environ=gpus(**{name: value}), node=node))
    assert found == [hidden(name, value, shown)]


FOUR_CPUS = replace(NODE, cpus=4)
NOTHING_SAID = {
    "nothing": make_inputs(),
    "all promised CPUs": make_inputs(environ=PROMISED, node=Node(2, 48)),
    "more CPUs than promised": make_inputs(environ=PROMISED, node=Node(2, 96)),
    "no number": make_inputs(environ={"SLURM_CPUS_PER_TASK": "many"}, node=FOUR_CPUS),
    "the right variable is also set": make_inputs(
        environ=PROMISED | {"SRUN_CPUS_PER_TASK": "48"}, node=FOUR_CPUS
    ),
    "outside of a step": make_inputs(ONE_NODE_SCRIPT, environ=PROMISED, node=FOUR_CPUS),
    "an interactive step": make_inputs(INTERACTIVE, environ=PROMISED, node=FOUR_CPUS),
    "without a job": make_inputs(None, environ=PROMISED, node=FOUR_CPUS),
    "as many CPUs as workers": make_inputs(node=Node(2, 2)),
    "threads by the option, and the variable empty": make_inputs(
        environ={OMP: ""}, options=threads("4")
    ),
    "threads that just fit": make_inputs(environ={OMP: "4"}),
    "explicit threads that just fit": make_inputs(options=threads("4")),
    "threads by division": make_inputs(options=threads("auto")),
    "threads that are no number": make_inputs(environ={OMP: "many"}),
    "threads of nested regions": make_inputs(environ={OMP: "16,2"}),
    "one thread each": make_inputs(environ={OMP: "1"}, node=Node(8, 8)),
    "a number of GPUs that is none": make_inputs(
        environ={**visible(CUDA="0"), "SLURM_GPUS_ON_NODE": "gpu:4"}, node=ONE_WORKER
    ),
    "no number of GPUs": make_inputs(environ=visible(CUDA="0"), node=ONE_WORKER),
    "all GPUs": make_inputs(
        environ=gpus(CUDA_VISIBLE_DEVICES=FOUR), node=replace(NODE, workers=4)
    ),
    "all GPUs by both variables": make_inputs(
        environ=gpus(CUDA_VISIBLE_DEVICES=FOUR, ROCR_VISIBLE_DEVICES=FOUR),
        node=replace(NODE, workers=4),
    ),
    "no variable says what torch sees": make_inputs(
        environ=gpus(), node=replace(ONE_WORKER, gpus=1)
    ),
    "a worker for each GPU": make_inputs(node=replace(NODE, gpus=2)),
    "fewer workers than GPUs, more than one": make_inputs(node=replace(NODE, gpus=4)),
    "one worker by the option": make_inputs(
        options=EXPLICIT_ONE, node=replace(ONE_WORKER, gpus=4)
    ),
    "one worker and one GPU": make_inputs(node=replace(ONE_WORKER, gpus=1)),
}


@pytest.mark.parametrize("inputs", NOTHING_SAID.values(), ids=NOTHING_SAID)
def test_nothing_is_said(inputs):
    assert said(inputs) == []


EVEN = Setting("even", "--hpc_bind")
BOUND = Binding(EVEN, tuple(Share((cpu,), "", "") for cpu in (0, 1)))
NOT_BOUND = Binding(EVEN, problem="2 agents of this node share the same CPUs")
CLOSE = {"OMP_PROC_BIND": "close", "OMP_PLACES": "cores", "KMP_AFFINITY": ""}


@pytest.mark.parametrize("binding", [None, NOT_BOUND])
@pytest.mark.parametrize(
    ("environ", "named"),
    [
        (CLOSE, "OMP_PROC_BIND=close, OMP_PLACES=cores"),
        ({"GOMP_CPU_AFFINITY": "0-7"}, "GOMP_CPU_AFFINITY=0-7"),
        ({}, "none of its usual variables is set"),
    ],
)
def test_imports_that_bind_all_workers_to_the_same_cpus(environ, named, binding):
    workers = Workers(2, binding=binding)
    (found,) = resources.of_imports(make_inputs(environ=environ), workers, {0, 1, 4})
    assert f"{found.code} {found.text}" == (
        "HPC227 OpenMP binds the main threads of all 2 workers to 3 CPUs (0-1,4) when "
        f"they import torch ({named}). To give each worker its own CPUs, pass "
        "--hpc-bind=gpu, or --hpc-bind=even without GPUs"
    )


@pytest.mark.parametrize(
    ("workers", "cpus"),
    [(Workers(2), set()), (Workers(1), {0}), (Workers(2, binding=BOUND), {0})],
)
def test_imports_that_nobody_has_to_know_of(workers, cpus):
    inputs = make_inputs(environ=CLOSE)
    assert not [*resources.of_imports(inputs, workers, cpus)]


def test_everything_is_said_at_once():
    environ = gpus(CUDA_VISIBLE_DEVICES="0,1") | PROMISED | {OMP: "9"}
    inputs = make_inputs(environ=environ, options=threads("2"), node=ONE_WORKER)
    codes = [text[:6] for text in said(inputs)]
    assert codes == ["HPC091", "HPC093", "HPC094", "HPC095"]


@pytest.mark.parametrize("value", ["", "-1", "NoDevFiles", " ", "-1,0", ",0"])
@pytest.mark.parametrize("workers", [1, 2])
def test_nothing_is_said_of_gpus_where_a_variable_hides_them(value, workers):
    node = Node(workers, 8, gpus=4)
    for name in resources.VISIBLE:
        inputs = make_inputs(environ=gpus(**{name: value}), node=node)
        assert said(inputs) == [], name


@pytest.mark.parametrize("environ", [{}, gpus()])
@pytest.mark.parametrize("workers", [1, 2])
def test_nothing_is_said_of_gpus_where_none_is(environ, workers):
    node = replace(NODE, workers=workers)
    assert said(make_inputs(environ=environ, node=node)) == []


def test_one_variable_hides_what_another_shows():
    environ = gpus(CUDA_VISIBLE_DEVICES="0,1", ROCR_VISIBLE_DEVICES="")
    assert said(make_inputs(environ=environ, node=ONE_WORKER)) == []


def test_the_line_is_for_the_nodes_of_the_launch():
    (message,) = said(make_inputs(node=ONE_CPU), nodes=17)
    assert (
        "srun --nodes=17 --ntasks=17 --ntasks-per-node=1 --cpus-per-task=2 " in message
    )


@pytest.mark.parametrize(
    ("job", "options", "fix"),
    [
        (step(), {}, "srun --nodes=3 "),
        (step(nodes=("jwb0001",), allocated_nodes=3), {}, "srun --nodes=1 "),
        # srun would start another step, or is not there
        (BATCH, {"standalone": True}, "\n    unset CUDA_VISIBLE_DEVICES"),
        (None, {}, "\n    unset CUDA_VISIBLE_DEVICES"),
        (
            None,
            {"nnodes": "2", "rdzv_endpoint": "10.10.0.1:1"},
            "\n    unset CUDA_VISIBLE_DEVICES",
        ),
    ],
)
def test_advice_of_every_plan(job, options, fix):
    environ = gpus(CUDA_VISIBLE_DEVICES="0")
    plan = make_plan(make_inputs(job, options=options, environ=environ))
    (message,) = plan.messages.advice
    assert message.code == "HPC095"
    assert fix in message.text


# --- anything -----------------------------------------------------------------------

# As an environment can hold it.
text = st.text(st.characters(exclude_characters="\0", codec="utf-8"), max_size=8)
usual = st.sampled_from(
    ["0", "1", "2", "4", "0,1", "0,-1", "-1", "NoDevFiles", "", "٣"]
)
READ = [
    OMP,
    slurm.CPUS_PER_TASK,
    slurm.SRUN_CPUS_PER_TASK,
    slurm.GPUS_ON_NODE,
    *resources.VISIBLE,
]
numbers = st.integers(1, 16)
every_inputs = st.builds(
    make_inputs,
    st.sampled_from([None, STEP, INTERACTIVE, ONE_NODE_SCRIPT]),
    environ=st.dictionaries(st.sampled_from(READ), usual | text),
    options=st.sampled_from([None, "auto", "1", "4"]).map(threads),
    node=st.builds(Node, numbers, numbers, st.integers(0, 8)),
)


@settings(max_examples=500, deadline=None)
@given(every_inputs)
# More digits than int() reads, and digits that it does not.
@example(make_inputs(environ=dict.fromkeys(READ, "9" * 5000), node=ONE_CPU))
@example(make_inputs(environ=dict.fromkeys(READ, "²"), node=replace(NODE, gpus=1)))
def test_any_text_in_the_variables(inputs):
    found = said(inputs)
    codes = [message[:6] for message in found]
    assert len(set(codes)) == len(codes)
    remedy = r"HPC09[1-7] .*\. (Pass|Give|Use|Show|To use|Add) "
    assert all(re.match(remedy, x, re.DOTALL) for x in found)
    if inputs.node.workers > inputs.node.cpus:
        assert codes[:1] in (["HPC091"], ["HPC092"])
    environ = inputs.environ
    visible = {resources._listed(environ[n]) for n in resources.VISIBLE if n in environ}
    if not min(visible, default=inputs.node.gpus):
        assert not {"HPC095", "HPC096", "HPC097"}.intersection(codes)
