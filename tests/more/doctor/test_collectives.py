"""A worker of the doctor's launch: what it writes, and with whom it runs what."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest
import torch

from tests.support.loopback import HERE
from tests.support.patience import PATIENCE
from tests.support.ports import own_port
from tests.support.processes import clean_environ, run_python
from torchrun_hpc import limits, wire
from torchrun_hpc.doctor import collectives, operations
from torchrun_hpc.doctor.operations import World
from torchrun_hpc.doctor.results import Collective, Torch, WorkerReport
from torchrun_hpc.variables import DOCTOR_RESULTS

PROGRAM = ("-m", "torchrun_hpc.doctor.collectives", "64", "60")
OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast")


def environ_of(rank, nodes, local_size, port=0):
    """Return what the tasks of direct mode have."""
    values = {
        "RANK": rank,
        "WORLD_SIZE": nodes * local_size,
        "LOCAL_RANK": rank % local_size,
        "LOCAL_WORLD_SIZE": local_size,
        "GROUP_RANK": rank // local_size,
        "GROUP_WORLD_SIZE": nodes,
        "MASTER_ADDR": HERE,
        "MASTER_PORT": port,
        "GLOO_SOCKET_IFNAME": "lo",
    }
    return {name: str(value) for name, value in values.items()}


def run_alone(folder, rank=0, results=None):
    """Run a worker that finds the modules of a folder first."""
    environ = clean_environ() | environ_of(rank, 1, 2)
    if results:
        environ[DOCTOR_RESULTS] = str(results)
    return run_python(*PROGRAM, environ=environ, path=[folder])


@pytest.fixture
def shadow(tmp_path):
    """Write a torch that is found first; return its folder."""

    def write(text):
        package = tmp_path / "torch"
        package.mkdir()
        (package / "__init__.py").write_text(text)
        return tmp_path

    return write


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("raise ImportError('libcudart.so.13: cannot open')", "ImportError: libcudart"),
        ("raise SystemExit(3)", "SystemExit: 3"),
        ("version = None", "AttributeError: "),
    ],
)
def test_a_torch_that_cannot_be_imported(shadow, text, problem):
    done = run_alone(shadow(text))
    begins = '{"at":[[0,[-1,"the import of torch"]]]}\n'
    assert (done.out, done.code) == (begins, 1)
    assert done.err.startswith("Traceback ")
    assert done.err.splitlines()[-1].startswith(problem)


TORCH = """\
import os
from types import SimpleNamespace

print("to stdout")
os.system("echo of a program")
__version__ = "9.9"
version = SimpleNamespace(cuda="13.0", hip=None)
cuda = SimpleNamespace(
    device_count=lambda: 4,
    is_available=lambda: True,
    nccl=SimpleNamespace(version=lambda: (2, 30, 7)),
)
backends = SimpleNamespace(cudnn=SimpleNamespace(version=lambda: 92600))
"""


def test_stdout_is_what_it_was(shadow, tmp_path):
    """It fails when it needs more of torch than there is."""
    results = tmp_path / "results"
    results.write_text("1\n")
    done = run_alone(shadow(TORCH), results=results)
    before, _, line = results.read_text().splitlines()
    assert before == "1"
    found = wire.decode(Torch, *json.loads(line)["imports"])
    assert found.version == "9.9"
    assert found.libraries == {"cuda": "13.0", "nccl": "2.30.7", "cudnn": "92600"}
    assert found.gpus == 4
    assert sorted(done.out.splitlines()) == ["of a program", "to stdout"]
    assert done.err.startswith("Traceback ")
    assert done.code == 1


@pytest.mark.parametrize(
    ("agent", "local_size", "gpus", "expected"),
    [
        ("True", 4, 4, True),
        ("True", 1, 8, True),
        ("False", 4, 3, False),
        ("True", 4, 1, False),  # they would share it
        (None, 4, 1, True),  # of a task
        (None, 4, 4, True),
        (None, 4, 2, False),
        (None, 1, 0, False),
    ],
)
def test_who_has_a_gpu(agent, local_size, gpus, expected):
    environ = environ_of(0, 1, local_size)
    if agent is not None:
        environ["TORCHELASTIC_USE_AGENT_STORE"] = agent
    assert operations.has_gpu(environ, gpus) == expected


class CountingStore(dict[str, int]):
    """Counts, as a store does."""

    def add(self, key, number):
        self[key] = self.get(key, 0) + number
        return self[key]


@pytest.mark.parametrize(
    ("backend", "nodes", "local_size", "expected"),
    [
        ("gloo", 2, 4, [("", 5, 8)]),
        ("nccl", 2, 4, [("", 5, 8), ("node 1", 0, 4)]),
        ("nccl", 8, 1, [("", 5, 8)]),
        ("nccl", 1, 8, [("", 5, 8)]),
        ("nccl", 1, 1, []),
    ],
)
def test_who_runs_them(backend, nodes, local_size, expected):
    size = nodes * local_size
    everyone = World("", min(5, size - 1), size, torch.device("cpu"))
    environ = environ_of(5, nodes, local_size)
    found = operations.worlds(environ, CountingStore(), backend, everyone)
    assert [world[:3] for world in found] == expected


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, {"NCCL_DEBUG", "NCCL_DEBUG_FILE", "NCCL_DEBUG_SUBSYS"}),
        ({"NCCL_DEBUG": "WARN"}, set()),
        ({"NCCL_DEBUG_FILE": "nccl.%p"}, set()),
    ],
)
def test_what_nccl_is_told(monkeypatch, environ, expected):
    monkeypatch.setattr(os, "dup2", lambda *_: None)
    found = operations.for_nccl(environ)
    assert {*found} == expected
    if "NCCL_DEBUG_FILE" in found:
        os.close(int(found["NCCL_DEBUG_FILE"].rpartition("/")[2]))


BEGIN = "jwb0001:28471:28502 [0] NCCL INFO "


@pytest.mark.parametrize(
    ("log", "expected"),
    [
        ("", ""),
        (f"{BEGIN}NET/Socket : Using [0]eth0:172.17.0.2<0>\n", ""),
        (f"{BEGIN}Bootstrap : Using ib0\n{BEGIN}Using network IB\n", "IB"),
        (f"{BEGIN}Using network Socket\nNCCL version 2.14.3+cuda11.7\n", "Socket"),
        (f"{BEGIN}Using non-device net plugin version 0\n", ""),
        (f"{BEGIN}Using network IBext_v8\r\n{BEGIN}Using network IB", "IBext_v8"),
        (f"[2026-11-27 10:00:00] {BEGIN}Using network AWS Libfabric", "AWS Libfabric"),
        (f"{BEGIN}Assigned NET plugin X to comm\n{BEGIN}Using network X\n", "X"),
        (f"{BEGIN}Using network \33[1m" + "x" * 100, " [1m" + "x" * 76),
    ],
)
def test_what_nccl_sends_by(log, expected):
    assert operations.transport(log) == expected


@pytest.fixture
def run_forks(monkeypatch, tmp_path):
    """Return what runs workers that are forks, so that torch is imported once.

    Each test and operation is run once or twice only.
    """
    monkeypatch.setattr(limits, "REPEAT_TIME", 0)
    monkeypatch.setattr(operations, "_LEAST", 1)
    results, out, err = (tmp_path / name for name in ("results", "out", "err"))
    for file in (results, out, err):
        file.touch()

    def fork(environ, max_bytes, prepare):
        pid = os.fork()
        if pid == 0:
            signal.alarm(PATIENCE)
            for number, file in enumerate((out, err), 1):
                os.dup2(os.open(file, os.O_WRONLY | os.O_APPEND), number)
            sys.stdout, sys.stderr = out.open("a"), err.open("a")
            sys.argv = ["-m", max_bytes, str(PATIENCE)]
            os.environ.update(environ)
            torch.set_num_threads(1)
            prepare(int(environ["RANK"]))
            collectives.main()
        return pid

    def run(nodes, local_size, max_bytes="32", prepare=lambda _: None):
        port = own_port()
        pids = []
        for rank in range(nodes * local_size):
            environ = environ_of(rank, nodes, local_size, port)
            environ[DOCTOR_RESULTS] = str(results)
            pids.append(fork(environ, max_bytes, prepare))
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
        assert out.read_text() == ""
        lines = [json.loads(line) for line in results.read_text().splitlines()]
        return codes, [pair for line in lines for pair in line.items()], err.read_text()

    return run


def of_kind(lines, kind):
    return [each for name, values in lines if name == kind for each in values]


def workers_of(lines):
    """Return what the workers have written in the end, by rank."""
    found = [wire.decode(WorkerReport, each) for each in of_kind(lines, "workers")]
    return sorted(found, key=lambda worker: worker.rank)


def test_one_worker(run_forks):
    codes, lines, errors = run_forks(1, 1)
    assert (codes, errors) == ([0], "")
    kinds = [kind for kind, _ in lines]
    assert kinds == ["at", "imports", "at", "backend", "at", "at", "workers"]
    (found,) = of_kind(lines, "imports")
    assert wire.decode(Torch, found).version == torch.__version__
    steps = ["the import of torch", "the first meeting", *["the compute test"] * 2]
    assert of_kind(lines, "at") == [[0, [n, step]] for n, step in enumerate(steps, -1)]
    (worker,) = workers_of(lines)
    assert (worker.rank, worker.node, worker.dtype) == (0, -1, "float32")
    assert (worker.late_s, worker.transport) == (0, "")
    assert dict(lines)["backend"] == "gloo"


def test_two_workers(run_forks, monkeypatch):
    """Of a node; the second one comes late, and its CPU is broken."""

    def prepare(rank):
        if rank == 1:
            monkeypatch.setattr(operations, "wait", wait_late)
            monkeypatch.setattr(torch, "matmul", broken)

    def broken(first, _):
        return torch.full_like(first, float("nan"))

    def wait_late(world, wait=operations.wait):
        time.sleep(0.05)
        return wait(world)

    codes, lines, errors = run_forks(1, 2, "100", prepare)
    assert (codes, errors) == ([0, 0], "")
    first, second = workers_of(lines)
    assert first.wrong == 0
    assert first.late_s < 0.03 < second.late_s
    assert first.norm == pytest.approx(1039.0411)
    assert (second.norm, second.wrong) == (0, 2 * 512**2)
    assert {*first.digests}.isdisjoint(second.digests)
    rows = [wire.decode(Collective, row) for row in of_kind(lines, "rows")]
    sizes = {"all_gather": [8, 32, 96], "reduce_scatter": [8, 32, 96]}
    expected = [
        (name, size) for name in OPERATIONS for size in sizes.get(name, [8, 32, 100])
    ]
    assert [(row.operation, row.size) for row in rows] == expected
    assert {(row.scope, row.wrong) for row in rows} == {("", 0)}
    # Both have said what they begin.
    own = [
        [step for by, (_, step) in of_kind(lines, "at") if by == rank]
        for rank in (0, 1)
    ]
    assert own[0] == own[1]
    steps = [f"{name} of {size} B" for name, size in expected]
    assert own[0][4:-1] == steps
    for rank in (0, 1):
        begun = [
            lines.index(("at", [[rank, [n, step]]])) for n, step in enumerate(steps, 3)
        ]
        ended = [place for place, (kind, _) in enumerate(lines) if kind == "rows"]
        assert all(map(int.__lt__, begun, ended))


def test_two_nodes_with_nccl(run_forks, monkeypatch):
    """Which is gloo, and writes what NCCL writes; the devices are the CPUs."""
    meet, init, end = (
        operations._meet,
        *(
            getattr(operations.distributed, f"{verb}_process_group")
            for verb in ("init", "destroy")
        ),
    )

    def meet_with_gpus(*args):
        store, backend, everyone = meet(*args)
        assert backend == "gloo"  # not all have one
        return store, "nccl", everyone

    def init_as_nccl(backend, **options):
        assert backend == "nccl"
        is_first = not os.environ.get("WAS_HERE")
        os.environ["WAS_HERE"] = "1"
        assert os.environ["NCCL_DEBUG"] == "INFO"
        if is_first:
            log = f"{BEGIN}Bootstrap : Using ib0\n{BEGIN}Using network IB\n"
            Path(os.environ["NCCL_DEBUG_FILE"]).write_text(log)
            os.write(1, b"NCCL version 2.14.3+cuda11.7\n")
        init("gloo", **options)

    def end_as_gloo():
        time.sleep(limits.GLOO_PAUSE)
        end()

    def prepare(rank):
        torch.cuda.is_available = lambda: True
        torch.cuda.device_count = lambda: 2 if rank < 2 else 0

    monkeypatch.setattr(operations, "_meet", meet_with_gpus)
    monkeypatch.setattr(operations.distributed, "init_process_group", init_as_nccl)
    monkeypatch.setattr(operations.distributed, "destroy_process_group", end_as_gloo)
    codes, lines, errors = run_forks(2, 2, prepare=prepare)
    assert (codes, errors) == ([0] * 4, "")
    rows = [wire.decode(Collective, row) for row in of_kind(lines, "rows")]
    assert {row.wrong for row in rows} == {0}
    sizes = {
        scope: [r.size for r in rows if (r.scope, r.operation) == (scope, "all_gather")]
        for scope in ("", "node 0", "node 1")
    }
    assert sizes == {"": [16, 32], "node 0": [8, 32], "node 1": [8, 32]}
    # As many processes have computed the same.
    workers = workers_of(lines)
    assert len({worker.device for worker in workers}) == 1
    assert len({digest for worker in workers for digest in worker.digests}) == 1
    assert [worker.transport for worker in workers] == ["IB"] * 4
    assert len(of_kind(lines, "imports")) == 2


def test_a_worker_that_fails(run_forks):
    codes, lines, errors = run_forks(1, 1, "x")
    assert codes == [1]
    assert [kind for kind, _ in lines] == ["at", "imports"]
    assert errors.startswith("Traceback ")
    assert errors.endswith("ValueError: invalid literal for int() with base 10: 'x'\n")
