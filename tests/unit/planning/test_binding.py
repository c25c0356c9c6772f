"""Which worker gets which CPUs: as the centres type it, and never one CPU twice."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.juelich import JSC, THREE, make_inputs, step
from tests.support.plans import make_plan, planned, visible
from tests.support.trees import (
    DGX_H100,
    FRONTIER,
    GB200,
    JUWELS_BOOSTER,
    LUMI,
    VIRTUAL,
    Machine,
    hiding,
    uuid,
    write,
)
from torchrun_hpc.errors import Setting
from torchrun_hpc.host.topology import Core, Gpu, Topology, this_node
from torchrun_hpc.names import numbers_in
from torchrun_hpc.planning import binding
from torchrun_hpc.planning.mode import Mode
from torchrun_hpc.schedulers import flux, hydra, jsrun, pals, pbs, slurm
from torchrun_hpc.schedulers.job import Task
from torchrun_hpc.schedulers.openmpi import MPIRUN


@pytest.fixture(scope="session")
def tree(tmp_path_factory):
    """Return what is read of a machine; each is written once."""
    known = {}

    def of(machine, mask=None):
        key = repr(machine)
        if key not in known:
            known[key] = write(machine, tmp_path_factory.mktemp("tree"))
        return this_node(known[key], machine.mask if mask is None else mask)

    return of


def bound(topology, workers, how="gpu", **changes):
    """Return the binding of an agent's workers."""
    inputs = make_inputs(
        options={"hpc_bind": how},
        topology=topology,
        workers=workers,
        cpus=len(topology.mask),
        **changes,
    )
    return binding.plan(inputs)


def cpus_of(found):
    """Return the CPUs of the workers: ``0-3,8-11 4-7,12-15``."""
    return " ".join(share.cpu_list for share in found.shares)


# --- as the centres type it -----------------------------------------------------------


def from_masks(text):
    """Return the CPUs of each task from masks in hexadecimal, as for srun."""
    return [
        {bit for bit in range(128) if int(mask, 16) >> bit & 1}
        for mask in text.split(",")
    ]


# Frontier reserves the first core of each L3 region, and gives one thread of a core.
NO_FIRST_CORES = {cpu for cpu in range(64) if cpu % 8}

# Both threads of each core.
BOTH_THREADS = (
    "49-55,113-119 57-63,121-127 17-23,81-87 25-31,89-95 "
    "1-7,65-71 9-15,73-79 33-39,97-103 41-47,105-111"
)
# 14 cores for each GPU.
FOURTEEN = (
    "0-13,112-125 14-27,126-139 28-41,140-153 42-55,154-167 "
    "56-69,168-181 70-83,182-195 84-97,196-209 98-111,210-223"
)
# The machine, the CPUs for each GPU, as the source has them, and the mask that the job
# gets if it is not all.
CENTRES = {
    # Frontier User Guide: srun -N1 -n8 -c7 --gpus-per-task=1 --gpu-bind=closest, and
    # the CPUs of each GPU in the output of hello_jobstep.
    "Frontier": (
        FRONTIER,
        "49-55 57-63 17-23 25-31 1-7 9-15 33-39 41-47",
        NO_FIRST_CORES,
    ),
    # LUMI's documentation, "Distribution and binding": --cpu-bind=mask_cpu:...
    "LUMI": (
        LUMI,
        from_masks(
            "fe000000000000,fe00000000000000,fe0000,fe000000,fe,fe00,"
            "fe00000000,fe0000000000"
        ),
        NO_FIRST_CORES,
    ),
    # The same with --hint=multithread.
    "LUMI, two threads": (
        LUMI,
        BOTH_THREADS,
        NO_FIRST_CORES | {cpu + 64 for cpu in NO_FIRST_CORES},
    ),
    # co-design.pop-coe.eu, "GPU affinity" on JUWELS Booster: --cpu-bind=map_ldom:...,
    # with GPUs 0 to 3 at NUMA nodes 3, 1, 7, 5. JSC documents no mask.
    "JUWELS": (JUWELS_BOOSTER, "18-23,66-71 6-11,54-59 42-47,90-95 30-35,78-83"),
    # bindpcie --cpu=exclusive.
    "DGX H100": (DGX_H100, FOURTEEN),
    # Megatron-Bridge: numactl --cpunodebind=$((SLURM_LOCALID/2)), which gives the same
    # 72 cores to two workers. Here each has half of these.
    "GB200": (GB200, "0-35 36-71 72-107 108-143"),
}


@pytest.mark.parametrize("case", CENTRES)
def test_as_the_centre_types_it(case, tree):
    machine, expected, *mask = CENTRES[case]
    found = bound(tree(machine, *mask), len(machine.gpus))
    if isinstance(expected, str):
        expected = [set(numbers_in(cpus)) for cpus in expected.split()]
    assert [set(share.cpus) for share in found.shares] == expected
    assert (found.problem, found.instead) == ("", "")
    for share, (address, node) in zip(found.shares, machine.gpus.items(), strict=True):
        assert share.domain.startswith(f"NUMA node {node}, ")
        assert address in share.reason


def test_what_a_worker_is_told(tree):
    found = bound(tree(FRONTIER), 8)
    share = found.shares[0]
    assert share.cpu_list == "48-55,112-119"
    assert share.domain == "NUMA node 3, L3 48-55,112-119"
    assert share.reason == "local to GPU 0 (0000:c1:00.0)"


# --- fewer workers, GPUs that are hidden or listed ------------------------------------

# The machine, and the variables; what each worker gets.
LISTED = {
    "one worker has all that is near": (FRONTIER, {}, "48-63,112-127"),
    "two workers": (FRONTIER, {}, "48-55,112-119 56-63,120-127"),
    "ROCR": (FRONTIER, visible(ROCR="4,2"), "0-15,64-79 16-31,80-95"),
    "HIP counts what ROCR leaves": (
        FRONTIER,
        visible(ROCR="4,2", HIP="1"),
        "16-31,80-95",
    ),
    "CUDA's name on AMD": (FRONTIER, visible(CUDA="4"), "0-15,64-79"),
    "HIP's goes before it": (FRONTIER, visible(CUDA="4", HIP="2"), "16-31,80-95"),
    "AMD's names": (
        FRONTIER,
        visible(ROCR=f"{uuid(4).upper()},{uuid(2)}"),
        "0-15,64-79 16-31,80-95",
    ),
    "hidden by a cgroup": (
        hiding(FRONTIER, 0, 1, 2, 3, 6, 7),
        visible(ROCR="0,1"),
        "0-7,64-71 8-15,72-79",
    ),
    "CUDA": (JUWELS_BOOSTER, visible(CUDA=" 2, 0"), "42-47,90-95 18-23,66-71"),
    "CUDA's names": (
        JUWELS_BOOSTER,
        visible(CUDA=f"{uuid(3)},{uuid(1)}"),
        "30-35,78-83 6-11,54-59",
    ),
    "NVIDIA's, hidden": (
        hiding(JUWELS_BOOSTER, 0, 2),
        visible(CUDA="0,1"),
        "6-11,54-59 30-35,78-83",
    ),
    "ROCm's is not for CUDA": (JUWELS_BOOSTER, visible(ROCR="3"), "18-23,66-71"),
}


@pytest.mark.parametrize("case", LISTED)
def test_which_gpu_is_a_workers(case, tree):
    machine, environ, expected = LISTED[case]
    found = bound(tree(machine), len(expected.split()), environ=environ)
    assert (cpus_of(found), found.instead) == (expected, "")


TWO_KINDS = replace(DGX_H100, models=("A", *"BBBBBBB"))


def test_gpus_of_several_kinds_in_the_order_of_their_addresses(tree):
    found = bound(tree(TWO_KINDS), 8, environ={"CUDA_DEVICE_ORDER": "PCI_BUS_ID"})
    assert cpus_of(found) == FOURTEEN


def test_a_gpu_that_is_near_all_cpus_leaves_another_its_own(tree):
    """Linux does not say where the first one is; it comes second all the same."""
    nested = replace(NONE, threads=1, gpus={"0000:01:00.0": -1, "0000:02:00.0": 0})
    found = bound(tree(nested), 2)
    assert (cpus_of(found), found.instead) == ("4-7 0-3", "")


# --- what cannot be divided by GPU is divided evenly ----------------------------------

NONE = Machine(cores=8, threads=2, cache=4, node=4, gpus={})
PARTS = "MIG-GPU-1/1/0,MIG-GPU-1/2/0"
HALVES = "0-71 72-143"

# The machine, the variables; why, what each worker gets, and the mask if it is not all.
INSTEAD = {
    "no GPU": (NONE, {}, "shows a GPU here", "0-3,8-11 4-7,12-15"),
    "fewer GPUs": (VIRTUAL, {}, "2 workers and 1 visible GPU", "0-3 4-7"),
    "none is seen": (VIRTUAL, visible(CUDA=""), "1 worker and 0 visible GPUs", "0-7"),
    "what follows a number that is none is not visible": (
        GB200,
        visible(CUDA="0,9,1"),
        "2 workers and 1 visible GPU",
        HALVES,
    ),
    "nor what is listed twice": (
        GB200,
        visible(CUDA="1,1"),
        "2 workers and 1 visible GPU",
        HALVES,
    ),
    "parts of GPUs": (GB200, visible(CUDA=PARTS), "parts of GPUs", HALVES),
    "several kinds": (
        TWO_KINDS,
        {},
        "CUDA_DEVICE_ORDER=PCI_BUS_ID",
        "0-55,112-167 56-111,168-223",
    ),
    # A job on a part of the node, whose CPUs are on the other socket.
    "far from the mask": (
        DGX_H100,
        visible(CUDA="4,5"),
        "0 of the 56 CPUs in the affinity mask are local to GPU 0-1",
        "0-27 28-55",
        set(range(56)),
    ),
    # Two cores of twelve.
    "most of the mask would be unused": (
        DGX_H100,
        {},
        "2 of the 12 CPUs in the affinity mask are local to GPU 0 (0000:1b:00.0)",
        "54-65",
        set(range(54, 66)),
    ),
}


@pytest.mark.parametrize("case", INSTEAD)
def test_evenly_instead(case, tree):
    machine, environ, reason, expected, *mask = INSTEAD[case]
    topology = tree(machine, *mask)
    workers = len(expected.split())
    found = bound(topology, workers, environ=environ)
    assert reason in found.instead
    assert cpus_of(found) == expected
    assert found.shares == bound(topology, workers, "even").shares


# --- evenly ---------------------------------------------------------------------------


def cores(*sizes, node=None, threads=1):
    """Return cores in L3 domains of so many, each on the NUMA node of its number."""
    total = sum(sizes)
    caches = [number for number, size in enumerate(sizes) for _ in range(size)]
    return [
        Core(
            tuple(core + i * total for i in range(threads)),
            cache // node if node else 0,
            str(cache),
        )
        for core, cache in enumerate(caches)
    ]


def sizes_of(parts):
    """Return for each part how many cores it has of which L3 domain."""
    return [
        {
            cache: sum(core.cache == cache for core in part)
            for cache in sorted({core.cache for core in part})
        }
        for part in parts
    ]


# The sizes of the L3 domains, the workers; what each gets of which domain.
DIVIDED = {
    "whole domains": (
        [8] * 8,
        4,
        [{"0": 8, "1": 8}, {"2": 8, "3": 8}, {"4": 8, "5": 8}, {"6": 8, "7": 8}],
    ),
    "half a domain": ([8, 8, 8], 2, [{"0": 8, "1": 4}, {"1": 4, "2": 8}]),
    "a mask with holes": (
        [8, 2, 8, 2, 3],
        2,
        [{"0": 8, "1": 2, "2": 2}, {"2": 6, "3": 2, "4": 3}],
    ),
    "unequal domains": ([8, 7, 8, 7], 4, [{"0": 8}, {"1": 7}, {"2": 8}, {"3": 7}]),
    "the larger ones last": ([7, 8, 7, 8], 4, [{"0": 7}, {"1": 8}, {"2": 7}, {"3": 8}]),
    "remainders": ([4, 4], 3, [{"0": 3}, {"0": 1, "1": 2}, {"1": 2}]),
    "remainders on each socket": (
        [56, 56],
        6,
        [{"0": 19}, {"0": 19}, {"0": 18}, {"1": 19}, {"1": 19}, {"1": 18}],
    ),
    "more workers than domains": ([4, 4], 4, [{"0": 2}, {"0": 2}, {"1": 2}, {"1": 2}]),
    "one core each": ([3], 3, [{"0": 1}] * 3),
    "one worker": ([3, 3], 1, [{"0": 3, "1": 3}]),
    "too few": ([3], 4, []),
}


@pytest.mark.parametrize("case", DIVIDED)
def test_divided(case):
    sizes, workers, expected = DIVIDED[case]
    assert sizes_of(binding.divide(cores(*sizes), workers)) == expected


def test_fewer_cores_than_workers():
    """Those that get two have the threads of one core."""
    parts = binding.divide(cores(3, threads=2), 4)
    assert [[core.cpus for core in part] for part in parts] == [
        [(0,), (3,)],
        [(1,), (4,)],
        [(2,)],
        [(5,)],
    ]


def test_cpus_that_are_numbered_in_turn():
    """Where even CPUs are on one socket, and odd ones on the other."""
    odd = [Core((cpu,), cpu % 2, f"{cpu % 2}") for cpu in range(8)]
    parts = binding.divide(odd, 2)
    assert [[core.cpus[0] for core in part] for part in parts] == [
        [0, 2, 4, 6],
        [1, 3, 5, 7],
    ]


sizes_of_domains = st.lists(st.integers(1, 9), min_size=1, max_size=12)


@given(sizes_of_domains, st.integers(1, 20), st.integers(1, 3), st.integers(1, 2))
def test_every_cpu_has_one_worker(sizes, workers, node, threads):
    known = cores(*sizes, node=node, threads=threads)
    parts = binding.divide(known, workers)
    total = sum(sizes)
    if total * threads < workers:
        assert parts == []
        return
    found = [cpu for part in parts for core in part for cpu in core.cpus]
    assert sorted(found) == list(range(total * threads))
    numbers = [len(part) for part in parts]
    assert max(numbers) - min(numbers) <= 1
    if total >= workers:
        assert {core for part in parts for core in part} == {*known}


@given(sizes_of_domains, st.integers(1, 20), st.integers(1, 3))
def test_at_most_one_domain_is_cut_between_two_workers(sizes, workers, node):
    """Nor is a worker on more NUMA nodes than others that follow each other need."""
    parts = binding.divide(cores(*sizes, node=node), workers)
    for one, other in itertools.pairwise(parts):
        assert len({c.domain for c in one} & {c.domain for c in other}) <= 1
        assert max(c.node for c in one) <= min(c.node for c in other)


@given(st.integers(1, 9), st.integers(1, 6), st.integers(1, 12))
def test_domains_stay_whole_where_they_fit(size, each, workers):
    parts = binding.divide(cores(*[size] * (workers * each)), workers)
    assert all({*found.values()} == {size} for found in sizes_of(parts))


@given(st.data())
def test_near_gpus_nothing_is_given_twice(data):
    number = data.draw(st.integers(1, 24))
    given_cores = tuple(cores(*data.draw(st.lists(st.integers(1, 6), max_size=6))))
    everything = sorted(cpu for core in given_cores for cpu in core.cpus)
    near = st.sampled_from([frozenset(everything[: i + 1]) for i in range(6)])
    gpus = tuple(Gpu(str(address), data.draw(near)) for address in range(number))
    found = bound(Topology(given_cores, gpus), number)
    taken = [cpu for share in found.shares for cpu in share.cpus]
    assert len(taken) == len({*taken})
    assert {*taken} <= {*everything}
    assert bool(taken) == (len(everything) >= number)
    assert all(share.cpus for share in found.shares)


# --- tasks that are workers (direct mode) ---------------------------------------------

LEFT = frozenset({*range(4), *range(8, 12)})

BINDS_NOTHING = "HPC222 --hpc_bind=even binds nothing"


def task(rank=0, launcher=slurm.SRUN, **changes):
    """Return what the plan is made from in one of two tasks."""
    of_two = Task(rank=rank, size=2, local_rank=rank, local_size=2)
    job = step(task=of_two, launcher=launcher)
    return replace(make_inputs(job=job, workers=1, **changes), mode=Mode.DIRECT)


@pytest.mark.parametrize(
    ("launcher", "line"),
    [
        (slurm.SRUN, ". Use srun --cpus-per-task=N --cpu-bind=cores"),
        (MPIRUN, ". Use mpirun --map-by slot:PE=N --bind-to core"),
        (hydra.MPIEXEC, ". Use mpiexec -bind-to core:N"),
        (flux.RUN, ". Use flux run --cores-per-task=N -o cpu-affinity=per-task"),
        (pals.MPIEXEC, ". Use mpiexec --depth=N --cpu-bind depth"),
        (jsrun.JSRUN, ". Use jsrun --cpu_per_rs=N --bind=packed:N"),
        (pbs.ANY_MPIEXEC, ""),
    ],
)
def test_the_launcher_binds_its_tasks(launcher, line):
    plan = make_plan(task(launcher=launcher, options={"hpc_bind": "even"}))
    assert plan.workers.binding.shares == ()
    (message,) = said(plan)
    reason = "in direct mode, the launcher binds each worker"
    assert str(message) == f"{BINDS_NOTHING}: {reason}{line}"


def test_only_the_first_task_says_that_it_is_not_bound():
    assert said(make_plan(task(1, options={"hpc_bind": "even"}))) == []


def test_a_site_does_not_bind_tasks():
    plan = make_plan(task(site=with_bind("gpu")))
    assert (plan.workers.binding.shares, said(plan)) == ((), [])


def test_several_agents_on_a_node(tree):
    """Each a world of its own: they share one mask, or the launcher has bound them."""
    job = step(nodes=THREE[:1], task=Task(size=2, local_size=2))
    options = {"hpc_bind": "even", "standalone": True}
    (message,) = said(planned(options=options, topology=tree(NONE), cpus=16, job=job))
    assert str(message) == f"{BINDS_NOTHING}: 2 agents of this node share the same CPUs"
    plan = planned(options=options, topology=tree(NONE, LEFT), cpus=8, job=job)
    assert said(plan) == []
    assert [share.cpu_list for share in plan.workers.binding.shares] == [
        "0-1,8-9",
        "2-3,10-11",
    ]


# --- who asks for it, and what is said ------------------------------------------------


def test_nobody_asks_for_it():
    assert binding.plan(make_inputs()) is None
    assert binding.plan(make_inputs(options={"hpc_bind": "none"})) is None


def test_the_patch_that_binds_is_left_out():
    options = {"hpc_bind": "even", "hpc_without_patches": "bind_workers"}
    found = binding.plan(make_inputs(options=options))
    assert (found.shares, found.problem) == ((), "--hpc_without_patches=bind_workers")


def with_bind(how):
    return replace(JSC, options={"hpc_bind": how})


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, Setting("even", "site jsc: bind")),
        ({"hpc_bind": "gpu"}, Setting("gpu", "--hpc_bind")),
        ({"hpc_bind": "none"}, None),
        ({"numa_binding": "node"}, None),  # it is typed: torch does it
    ],
)
def test_a_site_may_ask_for_it(options, expected):
    inputs = make_inputs(site=with_bind("even"), options=options)
    found = binding.plan(inputs)
    assert (found and found.setting) == expected


def said(plan):
    codes = ("HPC014", "HPC221", "HPC222", "HPC092")
    return [m for m in (*plan.messages.notes, *plan.messages.advice) if m.code in codes]


def test_what_is_said(tree):
    topology = tree(NONE)
    known = {"topology": topology, "cpus": 16, "gpus": 0}
    assert said(planned(options={"hpc_bind": "even"}, **known)) == []
    (message,) = said(planned(options={"hpc_bind": "gpu"}, **known))
    assert str(message) == (
        "HPC221 --hpc_bind=gpu divides the CPUs evenly: neither NVIDIA's nor AMD's "
        "driver shows a GPU here"
    )


def test_too_few_cpus(tree):
    plan = planned(
        options={"hpc_bind": "even"}, topology=tree(NONE, {3}), cpus=1, workers=2
    )
    (message,) = said(plan)
    assert message.code == "HPC092"
    assert "--hpc_bind=even binds none of them" in message.text
    assert plan.workers.binding.shares == ()


def test_workers_that_are_functions(tree):
    options = {"hpc_bind": "even", "run_path": True}
    (message,) = said(planned(options=options, topology=tree(NONE), cpus=16))
    reason = "--run_path starts functions, not commands"
    assert str(message) == f"{BINDS_NOTHING}: {reason}"


@pytest.mark.parametrize(
    ("options", "environ", "expected"),
    [
        ({}, {}, ("1", False)),
        ({"hpc_omp_threads": "auto"}, {}, ("4", True)),
        ({"hpc_omp_threads": "3"}, {}, ("3", False)),
        ({"hpc_omp_threads": "auto"}, {"OMP_NUM_THREADS": "2"}, (None, False)),
    ],
)
def test_threads_follow_the_cpus_of_a_worker(options, environ, expected, tree):
    """Where the GPUs are, there are 4 CPUs for the two that share them, 8 for one."""
    machine = replace(NONE, gpus={"0:1:00.0": 0, "0:2:00.0": 0, "0:3:00.0": 1})
    plan = planned(
        options={"hpc_bind": "gpu", **options},
        topology=tree(machine),
        cpus=16,
        workers=3,
        environ=environ,
    )
    assert [len(share.cpus) for share in plan.workers.binding.shares] == [4, 4, 8]
    threads = plan.environment.get("OMP_NUM_THREADS")
    value = None if threads is None else threads.value
    assert (value, plan.workers.binding.sets_threads) == expected
