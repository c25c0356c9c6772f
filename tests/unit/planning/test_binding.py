"""The CPUs of each worker: as the centres document it, and never one CPU twice."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.juelich import JSC, THREE, job_at, step
from tests.support.plans import (
    make_inputs,
    planned,
    planned_at,
    planned_task,
    values,
    visible,
)
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
from torchrun_hpc.planning.inputs import Node
from torchrun_hpc.planning.workers import Binding
from torchrun_hpc.schedulers import flux, hydra, jsrun, pals, pbs, slurm
from torchrun_hpc.schedulers.job import Task
from torchrun_hpc.schedulers.openmpi import MPIRUN

NOTHING: dict[str, str] = {}


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
        **changes,
        node=Node(workers, cpus=len(topology.mask), topology=topology),
    )
    return binding.plan(inputs)


def cpus_of(found):
    """Return the CPUs of the workers: ``0-3,8-11 4-7,12-15``."""
    return " ".join(share.cpu_list for share in found.shares)


# --- as the centres document it -------------------------------------------------------


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
# The machine, the job's mask if it is not all CPUs, and the CPUs for each GPU in the
# format of the source.
CENTRES = {
    # Frontier User Guide: srun -N1 -n8 -c7 --gpus-per-task=1 --gpu-bind=closest, and
    # the CPUs of each GPU in the output of hello_jobstep.
    "Frontier": (
        FRONTIER,
        NO_FIRST_CORES,
        "49-55 57-63 17-23 25-31 1-7 9-15 33-39 41-47",
    ),
    # LUMI's documentation, "Distribution and binding": --cpu-bind=mask_cpu:...
    "LUMI": (
        LUMI,
        NO_FIRST_CORES,
        from_masks(
            "fe000000000000,fe00000000000000,fe0000,fe000000,fe,fe00,"
            "fe00000000,fe0000000000"
        ),
    ),
    # The same with --hint=multithread.
    "LUMI, two threads": (
        LUMI,
        NO_FIRST_CORES | {cpu + 64 for cpu in NO_FIRST_CORES},
        BOTH_THREADS,
    ),
    # co-design.pop-coe.eu, "GPU affinity" on JUWELS Booster: --cpu-bind=map_ldom:...,
    # with GPUs 0 to 3 at NUMA nodes 3, 1, 7, 5. JSC documents no mask.
    "JUWELS": (JUWELS_BOOSTER, None, "18-23,66-71 6-11,54-59 42-47,90-95 30-35,78-83"),
    # bindpcie --cpu=exclusive.
    "DGX H100": (DGX_H100, None, FOURTEEN),
    # Megatron-Bridge: numactl --cpunodebind=$((SLURM_LOCALID/2)), which gives the same
    # 72 cores to two workers. Here each has half of these.
    "GB200": (GB200, None, "0-35 36-71 72-107 108-143"),
}


@pytest.mark.parametrize(("machine", "mask", "expected"), CENTRES.values(), ids=CENTRES)
def test_cpus_as_in_the_documentation_of_a_centre(machine, mask, expected, tree):
    found = bound(tree(machine, mask), len(machine.gpus))
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


@pytest.mark.parametrize(
    ("machine", "environ", "expected"), LISTED.values(), ids=LISTED
)
def test_which_gpu_is_a_workers(machine, environ, expected, tree):
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

# The machine, the mask if it is not all CPUs, and the variables; the reason, and the
# CPUs of each worker.
ONE_OF_TWO = "2 workers and 1 visible GPU"
INSTEAD = {
    "no GPU": (NONE, None, {}, "shows a GPU here", "0-3,8-11 4-7,12-15"),
    "fewer GPUs": (VIRTUAL, None, {}, ONE_OF_TWO, "0-3 4-7"),
    "no GPU is visible": (
        VIRTUAL, None, visible(CUDA=""), "1 worker and 0 visible GPUs", "0-7"
    ),
    "a GPU after a wrong number": (
        GB200, None, visible(CUDA="0,9,1"), ONE_OF_TWO, HALVES
    ),
    "a GPU is there twice": (GB200, None, visible(CUDA="1,1"), ONE_OF_TWO, HALVES),
    "parts of GPUs": (GB200, None, visible(CUDA=PARTS), "parts of GPUs", HALVES),
    "several kinds": (
        TWO_KINDS, None, {},
        "CUDA_DEVICE_ORDER=PCI_BUS_ID", "0-55,112-167 56-111,168-223",
    ),
    # A job on a part of the node, whose CPUs are on the other socket.
    "far from the mask": (
        DGX_H100, set(range(56)), visible(CUDA="4,5"),
        "0 of the 56 CPUs in the affinity mask are local to GPU 0-1", "0-27 28-55",
    ),
    # Two cores of twelve.
    "most of the mask would be unused": (
        DGX_H100, set(range(54, 66)), {},
        "2 of the 12 CPUs in the affinity mask are local to GPU 0 (0000:1b:00.0)",
        "54-65",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", INSTEAD)
def test_evenly_instead(case, tree):
    machine, mask, environ, reason, expected = INSTEAD[case]
    topology = tree(machine, mask)
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


@pytest.mark.parametrize(
    ("sizes", "workers", "expected"), DIVIDED.values(), ids=DIVIDED
)
def test_divided(sizes, workers, expected):
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
    """Even CPUs are on one socket, and odd ones on the other."""
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
EVEN = {"hpc_bind": "even"}


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
    job = replace(job_at([0, 0], 0), launcher=launcher)
    plan = planned_task(job, options=EVEN)
    assert shares_of(plan) == []
    reason = "in direct mode, the launcher binds each worker"
    assert said(plan) == [f"{BINDS_NOTHING}: {reason}{line}"]


def test_only_the_first_task_says_that_it_is_not_bound():
    assert said(planned_at([0, 0], 1, options=EVEN)) == []


def test_a_site_does_not_bind_tasks():
    plan = planned_at([0, 0], 0, site=with_bind("gpu"))
    assert (shares_of(plan), said(plan)) == ([], [])


def test_several_agents_on_a_node(tree):
    """Each has a world of its own. They share one mask, or the launcher binds them."""
    job = step(nodes=THREE[:1], task=Task(size=2, local_size=2))
    options = EVEN | {"standalone": True}
    plan = planned(job, options=options, node=Node(2, 16, topology=tree(NONE)))
    reason = "2 agents of this node share the same CPUs"
    assert said(plan) == [f"{BINDS_NOTHING}: {reason}"]
    plan = planned(job, options=options, node=Node(2, 8, topology=tree(NONE, LEFT)))
    assert said(plan) == []
    assert shares_of(plan) == ["0-1,8-9", "2-3,10-11"]


# --- who asks for it, and what is said ------------------------------------------------


def binding_of(plan):
    """Return the binding of a plan that has one."""
    assert plan.workers.binding is not None
    return plan.workers.binding


def shares_of(plan):
    """Return the CPUs of each worker of a plan with a binding."""
    return [share.cpu_list for share in binding_of(plan).shares]


def said(plan):
    """Return what a plan says about the binding."""
    codes = ("HPC014", "HPC221", "HPC222", "HPC092")
    messages = (*plan.messages.notes, *plan.messages.advice)
    return [str(message) for message in messages if message.code in codes]


def with_bind(how):
    return replace(JSC, options={"hpc_bind": how})


def test_the_patch_that_binds_is_left_out():
    options = EVEN | {"hpc_without_patches": "bind_workers"}
    found = binding.plan(make_inputs(options=options))
    assert found == Binding(
        Setting("even", "--hpc_bind"), problem="--hpc_without_patches=bind_workers"
    )


@pytest.mark.parametrize(
    ("site", "options", "expected"),
    [
        (JSC, {}, None),
        (JSC, {"hpc_bind": "none"}, None),
        (with_bind("even"), {}, Setting("even", "site jsc: bind")),
        (with_bind("even"), {"hpc_bind": "gpu"}, Setting("gpu", "--hpc_bind")),
        (with_bind("even"), {"hpc_bind": "none"}, None),
        (with_bind("even"), {"numa_binding": "node"}, None),  # PyTorch does it
    ],
)
def test_the_user_or_a_site_asks_for_it(site, options, expected):
    found = binding.plan(make_inputs(site=site, options=options))
    assert (found and found.setting) == expected


def test_what_is_said(tree):
    node = Node(2, cpus=16, topology=tree(NONE))
    assert said(planned(options=EVEN, node=node)) == []
    (message,) = said(planned(options={"hpc_bind": "gpu"}, node=node))
    assert message == (
        "HPC221 --hpc_bind=gpu divides the CPUs evenly: neither NVIDIA's nor AMD's "
        "driver shows a GPU here"
    )


def test_too_few_cpus(tree):
    plan = planned(options=EVEN, node=Node(2, cpus=1, topology=tree(NONE, {3})))
    (message,) = said(plan)
    assert message.startswith("HPC092 ")
    assert "--hpc_bind=even binds none of them" in message
    assert shares_of(plan) == []


def test_workers_that_are_functions(tree):
    node = Node(2, cpus=16, topology=tree(NONE))
    plan = planned(options=EVEN | {"run_path": True}, node=node)
    reason = "--run_path starts functions, not commands"
    assert said(plan) == [f"{BINDS_NOTHING}: {reason}"]


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
    """Two workers share the 8 CPUs near their GPUs. The third worker has 8 CPUs."""
    machine = replace(NONE, gpus={"0:1:00.0": 0, "0:2:00.0": 0, "0:3:00.0": 1})
    plan = planned(
        options={"hpc_bind": "gpu", **options},
        environ=environ,
        node=Node(3, cpus=16, topology=tree(machine)),
    )
    assert [len([*numbers_in(cpus)]) for cpus in shares_of(plan)] == [4, 4, 8]
    threads = values(plan.environment).get("OMP_NUM_THREADS")
    assert (threads, binding_of(plan).sets_threads) == expected
