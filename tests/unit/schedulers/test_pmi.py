"""PMI-1 on the wire, against a process manager that answers as the real ones do."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import threading
from typing import Any, NamedTuple

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.support.patience import PATIENCE
from torchrun_hpc import limits, preflight
from torchrun_hpc.errors import LaunchError
from torchrun_hpc.reporting import console
from torchrun_hpc.schedulers import pmi


def exchange_in_launch(environ):
    return preflight._exchange(console.write, environ)


MAPPING = "(vector,(0,3,1))"


class Dialect(NamedTuple):
    """What a process manager answers."""

    init: str
    kvsname: str
    found: str
    not_found: str
    put: str
    barrier: str


MPICH_4 = Dialect(
    init="cmd=response_to_init pmi_version=1 pmi_subversion=1 rc=0",
    kvsname="cmd=my_kvsname kvsname=kvs_10_0_553459019_jwb0001",
    found="cmd=get_result rc=0 msg=success value={}",
    not_found="cmd=get_result rc=-1 msg=key_{}_not_found value=unknown",
    put="cmd=put_result rc=0 msg=success",
    barrier="cmd=barrier_out",
)
# Its name of the store is not unique: the number of mpiexec on one machine.
INTEL = MPICH_4._replace(kvsname="cmd=my_kvsname kvsname=kvs_17_0")
MPICH_5 = Dialect(
    init="cmd=response_to_init rc=0 pmi_version=1 pmi_subversion=2",
    kvsname="cmd=my_kvsname rc=0 kvsname=kvs_26_0_1322969334_jwb0001",
    found="cmd=get_result rc=0 value={}",
    not_found="cmd=get_result rc=1",
    put="cmd=put_result rc=0",
    barrier="cmd=barrier_out tag=0",
)
DIALECTS = {"MPICH 4": MPICH_4, "Intel MPI": INTEL, "MPICH 5": MPICH_5}


class Manager:
    """A process manager with a thread for each task."""

    def __init__(self, dialect=MPICH_4, tasks=3, mapping=MAPPING):
        self.dialect = dialect
        self.kvsname = dialect.kvsname.rpartition("=")[2]
        self.store = {"PMI_process_mapping": mapping} if mapping else {}
        self.barrier = threading.Barrier(tasks, timeout=PATIENCE)
        self.asked: list[list[str]] = [[] for _ in range(tasks)]
        self.sockets = []
        self.environs = []
        for rank in range(tasks):
            ours, theirs = socket.socketpair()
            self.sockets += [ours, theirs]
            self.environs.append(
                {
                    "PMI_FD": f"{theirs.fileno()}",
                    "PMI_RANK": f"{rank}",
                    "PMI_SIZE": f"{tasks}",
                }
            )
            threading.Thread(target=self.serve, args=(ours, rank), daemon=True).start()

    def serve(self, connection, rank):
        # The task may be gone before it has read the answer, or waits alone too long.
        with (
            contextlib.suppress(OSError, threading.BrokenBarrierError),
            connection.makefile("rwb", buffering=0) as stream,
        ):
            for line in stream:
                text = line.decode().removesuffix("\n")
                self.asked[rank].append(text)
                words = dict(word.split("=", 1) for word in text.split())
                stream.write(f"{self.answer(words)}\n".encode())

    def answer(self, words):
        """Answer as the table says; anything else is a fault of the test."""
        command, key = words.pop("cmd"), words.get("key")
        if command in {"get", "put"}:
            assert words.pop("kvsname") == self.kvsname
        if command == "init":
            assert words == {"pmi_version": "1", "pmi_subversion": "1"}
        if command == "barrier_in":
            self.barrier.wait()
        if command == "put":
            self.store[key] = words["value"]
        if command == "get":
            known = key in self.store
            form = self.dialect.found if known else self.dialect.not_found
            return form.format(self.store.get(key, key))
        return {
            "init": self.dialect.init,
            "get_my_kvsname": self.dialect.kvsname,
            "put": self.dialect.put,
            "barrier_in": self.dialect.barrier,
            "finalize": "cmd=finalize_ack",
        }[command]

    def exchange(self, hosts=None, machines=None):
        """Let all tasks ask; return what each was told."""
        found: list[Any] = [None] * len(self.environs)
        hosts = hosts or [f"jwb000{rank + 1}" for rank in range(len(found))]
        machines = machines or [""] * len(found)

        def ask(rank):
            found[rank] = pmi.exchange(
                self.environs[rank], hosts[rank], machine=machines[rank]
            )

        threads = [
            threading.Thread(target=ask, args=(rank,)) for rank in range(len(found))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=PATIENCE)
        return found

    def close(self):
        for one in self.sockets:
            one.close()


@pytest.fixture
def manager():
    with contextlib.ExitStack() as stack:
        yield lambda *args, **kwargs: stack.enter_context(
            contextlib.closing(Manager(*args, **kwargs))
        )


# --- who answers --------------------------------------------------------------------


@pytest.mark.parametrize("name", DIALECTS)
def test_all_tasks_hear_the_same(manager, name):
    """Each launch hears something else, even if the manager gives both one name."""
    instances = set()
    for _ in range(2):
        first, *others = manager(DIALECTS[name]).exchange()
        assert others == [first, first]
        assert (first.first_host, first.node_of_rank) == ("jwb0001", (0, 1, 2))
        assert first.hosts == ("jwb0001", "jwb0002", "jwb0003")
        assert len(first.instance) == 8
        instances.add(first.instance)
    assert len(instances) == 2


def test_the_connection_stays_usable(manager):
    """MPI_Init comes later; after finalize it would fail."""
    asked = manager()
    asked.exchange()
    for lines in asked.asked:
        assert not [line for line in lines if "finalize" in line]
    assert asked.asked[0][0] == "cmd=init pmi_version=1 pmi_subversion=1"
    descriptor = int(asked.environs[1]["PMI_FD"])
    os.write(descriptor, b"cmd=get_my_kvsname\n")
    assert os.read(descriptor, 100).decode() == f"{MPICH_4.kvsname}\n"


@pytest.mark.parametrize("mapping", ["(vector,(0,2,2))", "(vector,(0,2,1))"])
def test_one_task_of_each_node_says_where_it_is_and_the_first_asks_all(
    manager, mapping
):
    """The others ask as many questions on a thousand nodes as on two."""
    asked = manager(tasks=4, mapping=mapping)
    places = pmi.parse_mapping(mapping, 4)
    found = asked.exchange(hosts=[f"jwb000{1 + node}" for node in places])
    assert {task.hosts for task in found} == {("jwb0001", "jwb0002")}
    assert {task.node_of_rank for task in found} == {places}
    leaders = [places.index(0), places.index(1)]
    for rank, lines in enumerate(asked.asked):
        puts = [line for line in lines if "_host_" in line and "cmd=put" in line]
        gets = [line for line in lines if "cmd=get " in line]
        assert len(puts) == (rank in leaders)
        assert len(gets) == (5 if rank == 0 else 3)


SIGNS = "a,b c=d/\u0142"

# For each rank its host, and what the process manager says; the node of each rank, and
# the names of the nodes.
HOSTS = {
    "a host between": ("aba", "(vector,(0,3,1))", (0, 1, 0), "ab"),
    "several hosts between": ("abcab", "(vector,(0,5,1))", (0, 1, 2, 0, 1), "abc"),
    "several tasks each time": ("aabbaa", "(vector,(0,3,2))", (0, 0, 1, 1, 0, 0), "ab"),
    "side by side": ("aab", "(vector,(0,3,1))", (0, 0, 1), "ab"),
    "always the same": ("aaa", "(vector,(0,3,1))", (0, 0, 0), "a"),
    "one on each, no mapping": ("abc", None, (0, 1, 2), "abc"),
    "no mapping": ("abab", None, (0, 1, 0, 1), "ab"),
    "in turn, no mapping": ("abcabc", None, (0, 1, 2, 0, 1, 2), "abc"),
    "without a name": (["", "b", ""], MAPPING, (0, 1, 2), ["", "b", ""]),
    # Names that no host has: the list has commas, and a line ends at a blank.
    "a reference": (["n9", "#0", "#0"], MAPPING, (0, 1, 1), ["n9", "-0"]),
    "signs": (["n9", *[SIGNS] * 2], MAPPING, (0, 1, 1), ["n9", "a-b-c-d--"]),
}


@pytest.mark.parametrize("case", HOSTS)
@pytest.mark.parametrize("name", DIALECTS)
def test_a_host_that_is_there_twice_is_one_node(manager, name, case):
    hosts, mapping, places, nodes = HOSTS[case]
    asked = manager(DIALECTS[name], tasks=len(hosts), mapping=mapping)
    found = asked.exchange(hosts=list(hosts))
    told = {(task.first_host, task.node_of_rank, task.hosts) for task in found}
    assert told == {(hosts[0], places, tuple(nodes))}


def test_machines_of_one_name_are_several_nodes(manager):
    """Containers, or ``localhost``: tasks also ask what distinguishes the machines."""
    for task in manager().exchange(hosts=["a", "a", "a"], machines=["1", "2", "1"]):
        assert (task.node_of_rank, task.hosts) == ((0, 1, 0), ("a", "a"))


def test_long_lists_are_told_in_parts(manager):
    tasks = 12
    asked = manager(tasks=tasks, mapping=f"(vector,(0,{tasks},1))")
    hosts = [f"{rank}.{'x' * 240}" for rank in range(tasks)]
    first, *others = asked.exchange(hosts=hosts)
    assert others == [first] * (tasks - 1)
    assert first.hosts == tuple(hosts)
    assert max(len(line) for lines in asked.asked for line in lines) < 700


def test_an_answer_may_come_in_pieces(manager, monkeypatch):
    asked = manager(tasks=1)
    write = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, data[:3]))
    (found,) = asked.exchange()
    assert found.first_host == "jwb0001"
    assert asked.asked[0][0] == "cmd=init pmi_version=1 pmi_subversion=1"


def test_late_tasks_are_waited_for_and_reported(manager, monkeypatch):
    monkeypatch.setattr(limits, "FIRST_REPORT", 0.05)
    monkeypatch.setattr(limits, "NEXT_REPORT", 0.05)
    asked = manager(tasks=2)
    reported = []
    found = []

    def wait(seconds):
        reported.append(seconds)
        if len(reported) == 3:
            late.start()

    late = threading.Thread(
        target=lambda: found.append(pmi.exchange(asked.environs[1], "jwb0002"))
    )
    first = pmi.exchange(asked.environs[0], "jwb0001", wait)
    late.join(timeout=PATIENCE)
    assert found == [first]
    assert len(reported) >= 3
    assert reported == sorted(reported)


@pytest.mark.parametrize("rank", [0, 1])
def test_the_first_task_says_that_others_are_late(manager, monkeypatch, capsys, rank):
    monkeypatch.setattr(limits, "FIRST_REPORT", 0.05)
    monkeypatch.setattr(limits, "NEXT_REPORT", 0.05)
    asked = manager(tasks=2)
    environs = [environ | {"MPI_LOCALRANKID": "0"} for environ in asked.environs]
    thread = threading.Thread(target=exchange_in_launch, args=(environs[rank],))
    real, waits = pmi.exchange, threading.Event()

    def exchange(environ, host, wait, boot):
        def after(seconds):
            wait(seconds)
            waits.set()

        return real(environ, host, after, boot)

    monkeypatch.setattr(pmi, "exchange", exchange)
    thread.start()
    assert waits.wait(PATIENCE)
    real(environs[1 - rank], "jwb0002")
    thread.join(timeout=PATIENCE)
    printed = capsys.readouterr()
    message = r"HPC131\]: waiting for 1 other task .* s so far. The limit is 900"
    for line in printed.err.splitlines():
        assert re.search(message, line)
    assert (bool(printed.err), printed.out) == (rank == 0, "")


def test_the_wait_for_other_tasks_ends(manager, monkeypatch, tmp_path):
    monkeypatch.setattr(limits, "FIRST_REPORT", 0.05)
    monkeypatch.setattr(limits, "NEXT_REPORT", 0.05)
    monkeypatch.setattr(limits, "JOIN_TIMEOUT", 0.2)
    (tmp_path / "nodes").write_text("dec0001\ndec0002\n")
    monkeypatch.setenv("PBS_JOBID", "1.desched1")
    monkeypatch.setenv("PBS_NODEFILE", str(tmp_path / "nodes"))
    environ = manager(tasks=3).environs[1] | {"MPI_LOCALRANKID": "0"}
    with pytest.raises(LaunchError) as caught:
        exchange_in_launch(environ)
    assert caught.value.code == "HPC166"
    tasks = "s for 2 other tasks on the nodes of the job (dec0001, dec0002) to start."
    assert tasks in str(caught.value)


# --- who does not -------------------------------------------------------------------


def answered_with(*answers, close=True):
    """Ask a process manager that says this, whatever it is asked."""
    ours, theirs = socket.socketpair()

    def serve():
        with contextlib.suppress(OSError):
            for answer in answers:
                ours.recv(1000)
                ours.sendall(answer)
            if close:
                ours.shutdown(socket.SHUT_RDWR)

    threading.Thread(target=serve, daemon=True).start()
    with ours, theirs:
        environ = {"PMI_FD": f"{theirs.fileno()}", "PMI_RANK": "1", "PMI_SIZE": "2"}
        return pmi.exchange(environ, "jwb0001")


INIT = f"{MPICH_4.init}\n".encode()
NAME = f"{MPICH_4.kvsname}\n".encode()
NONE = b"cmd=get_result rc=-1 value=unknown\n"
PUT = f"{MPICH_4.put}\n".encode()
OUT = b"cmd=barrier_out\n"
TOLD = [INIT, NAME, NONE, PUT, OUT, OUT]


@pytest.mark.parametrize(
    "answers",
    [
        [],
        [INIT],
        [INIT, NAME],
        [INIT, NAME, NONE],
        [INIT, NAME, NONE, PUT],
        [INIT, NAME, NONE, PUT, OUT],
        TOLD,
        [*TOLD, NONE],
        [*TOLD, b"cmd=get_result rc=0\n"],
        [*TOLD, b"cmd=get_result rc=0 value=\n"],
        [*TOLD, b"cmd=get_result rc=0 value=jwb0001\n"],
        [*TOLD, b"cmd=get_result rc=0 value=jwb0001/0badcafe/x\n"],
        [INIT, NAME, OUT, b"cmd=get_result rc=0 value=jwb0001/\n"],
        [b"\n"] * 5,
        [b"=\n"] * 5,
        [b"\xff\xfe\n"] * 5,
        [b"HTTP/1.1 400 Bad Request\n"] * 5,
        [b"cmd"],
        [b"x" * 70_000],
    ],
)
def test_what_is_no_answer(answers):
    assert answered_with(*answers) is None


def test_no_answer_at_all(monkeypatch):
    monkeypatch.setattr(limits, "PMI_TIMEOUT", 0.1)
    assert answered_with(close=False) is None


@pytest.mark.parametrize(
    "answer",
    [
        b"cmd=get_result rc=0 value=jwb0001/0badcafe/0 msg=success\n",
        b"value=jwb0001/0badcafe/0 rc=0 cmd=get_result\n",
        b"  cmd=get_result   rc=0 value=jwb0001/0badcafe/0  \n",
    ],
)
@pytest.mark.parametrize("mapping", [b"\xff\n", b"cmd=get_result rc=0 value=(0)\n"])
def test_fields_in_any_order(answer, mapping):
    found = answered_with(INIT, NAME, mapping, PUT, OUT, OUT, answer)
    assert found == pmi.Exchanged("jwb0001", "0badcafe")


@pytest.mark.parametrize("hosts", ["a", "a,b,c", "a,#7x", ",,"])
def test_a_list_of_hosts_that_is_not_of_these_nodes(hosts):
    """It is the same for all tasks, so that all of them do without, or none is told."""
    answers = (f"cmd=get_result rc=0 value={v}\n" for v in ("a/0badcafe/1", hosts))
    found = answered_with(*TOLD, *(answer.encode() for answer in answers))
    assert found in {None, pmi.Exchanged("a", "0badcafe")}


@pytest.mark.parametrize(
    "changes",
    [
        {"PMI_RANK": "2"},
        {"PMI_RANK": "-1"},
        {"PMI_SIZE": "999999999"},
        {"PMI_FD": None},
        {"PMI_FD": ""},
        {"PMI_FD": "x"},
        {"PMI_FD": "-1"},
        {"PMI_FD": "99999"},
        {"PMI_FD": "9" * 30},
        {"PMI_RANK": None},
        {"PMI_RANK": "x"},
        {"PMI_SIZE": ""},
        {"PMI_FD": None, "PMI_PORT": "nonsense"},
        {"PMI_FD": None, "PMI_PORT": ":1"},
        {"PMI_FD": None, "PMI_PORT": "127.0.0.1:x"},
        {"PMI_FD": None, "PMI_PORT": "127.0.0.1:99999"},
        {"PMI_FD": None, "PMI_PORT": "127.0.0.1:1"},
        {"PMI_FD": None, "PMI_PORT": f"{'x' * 70}.invalid:1"},
    ],
)
def test_variables_that_name_no_process_manager(changes):
    environ = {"PMI_FD": "99999", "PMI_RANK": "0", "PMI_SIZE": "2"} | changes
    environ = {name: value for name, value in environ.items() if value is not None}
    assert pmi.exchange(environ, "jwb0001") is None


def test_a_descriptor_of_something_else():
    with open(os.devnull, "rb") as file:  # noqa: PTH123 - not to be written to
        environ = {"PMI_FD": f"{file.fileno()}", "PMI_RANK": "0", "PMI_SIZE": "2"}
        assert pmi.exchange(environ, "jwb0001") is None


# --- on a port ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pmi_id", "expected"), [({"PMI_ID": "7"}, "7"), ({}, "0")], ids=["id", "rank"]
)
def test_on_a_port(manager, pmi_id, expected):
    answers = manager(tasks=1)
    received: list[str] = []

    def serve():
        connection, _ = server.accept()
        with connection, connection.makefile("rwb", buffering=0) as stream:
            received.append(stream.readline().decode())
            stream.write(b"cmd=initack\ncmd=set size=1\ncmd=set rank=0\n")
            stream.write(b"cmd=set debug=0\n")
            answers.serve(connection, 0)

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        port = server.getsockname()[1]
        environ = {"PMI_PORT": f"127.0.0.1:{port}", "PMI_RANK": "0", "PMI_SIZE": "1"}
        found = pmi.exchange(environ | pmi_id, "jwb0001")
        thread.join(timeout=PATIENCE)
    assert found is not None
    assert (found.first_host, found.node_of_rank) == ("jwb0001", (0,))
    assert received == [f"cmd=initack pmiid={expected}\n"]


# --- the end ------------------------------------------------------------------------


def test_finalize():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(b"cmd=finalize_ack\n")
        pmi.finalize({"PMI_FD": f"{theirs.fileno()}"})
        assert ours.recv(100) == b"cmd=finalize\n"


@pytest.mark.parametrize(
    "environ", [{}, {"PMI_FD": ""}, {"PMI_FD": "x"}, {"PMI_FD": "99"}]
)
def test_nothing_to_finalize(environ):
    pmi.finalize(environ)
    pmi.finalize_at_end(environ)


# --- where tasks are ----------------------------------------------------------------

# The options of mpiexec, Hydra's answer, and the nodes of the tasks; as seen.
MAPPINGS = {
    "-ppn 1 -n 3": [("(vector,(0,3,1))", "012")],
    "-hosts a:2,b:1 -n 3": [
        ("(vector,(0,1,2),(1,1,1))", "001"),
        ("(vector,(0,1,2),1)", "001"),
    ],
    "-ppn 1 -n 4, in turn": [
        ("(vector,(0,2,1))", "0101"),
        ("(vector,(0,2,1),(0,2,1))", "0101"),
        ("(vector,[(0,2,1)]x2)", "0101"),
    ],
    "-n 4, Intel": [("(vector,(0,2,2))", "0011")],
    "-ppn 2 -n 4": [("(vector,(0,2,2))", "0011")],
    "-ppn 2 -n 3": [
        ("(vector,(0,2,2))", "001"),
        ("(vector,(0,1,2),(1,1,1))", "001"),
        ("(vector,(0,1,2),1)", "001"),
    ],
    "-hosts a:1,b:2 -n 5": [
        ("(vector,(0,1,1),(1,1,2))", "01101"),
        ("(vector,(0,2,2),(0,1,1))", "00110"),
        ("(vector,0,(1,1,2),(0,2,1))", "01101"),
    ],
    "-hosts a:2,b:1,c:2 -n 5": [
        ("(vector,(0,1,2),(1,1,1),(2,1,2))", "00122"),
        ("(vector,(0,2,2),(2,1,1))", "00112"),
        ("(vector,(0,1,2),1,(2,1,2))", "00122"),
    ],
    "not seen": [
        ("(vector,5)", "0"),
        ("(vector,1,0)", "01"),  # numbered in the order of the ranks
        ("(vector,(3,2,1))", "01"),
        ("(vector,0,[1]x3,2)", "01112"),
        ("(vector,[0,1]x2,[2]x2)", "010122"),
        ("(vector,(0,2,0),(0,1,1))", "0"),
    ],
}
CASES = [(text, places) for rows in MAPPINGS.values() for text, places in rows]


@pytest.mark.parametrize(("text", "places"), CASES)
def test_mapping(text, places):
    assert pmi.parse_mapping(text, len(places)) == tuple(map(int, places))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "unknown",
        "(vector)",
        "(vector,)",
        "(vector,())",
        "(vector,(0,0,1))",
        "(vector,(0,3,0))",
        "(vector,(0,3,1)",
        "vector,(0,3,1)",
        "(vector,(0,3,-1))",
        "(vector,(0,3,1))\n(vector,(0,3,1))",
        "(cyclic,(0,3,1))",
    ],
)
def test_what_is_no_mapping(text):
    assert pmi.parse_mapping(text, 3) == ()


numbers = st.integers(0, 99).map(str)
blocks = st.recursive(
    numbers | st.tuples(numbers, numbers, numbers).map(lambda b: f"({','.join(b)})"),
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=3).map(",".join),
        st.tuples(inner, numbers).map(lambda pair: f"[{pair[0]}]x{pair[1]}"),
    ),
    max_leaves=6,
)


@given(
    st.text()
    | st.text("(),[]x0123").map(lambda text: f"(vector,{text})")
    | blocks.map(lambda text: f"(vector,{text})"),
    st.integers(0, 50),
)
@example("(vector,[[1]x99999]x99999)", 3)
@example("(vector,99999999999999999999)", 3)
def test_any_text_is_a_mapping_of_all_tasks_or_none(text, size):
    found = pmi.parse_mapping(text, size)
    assert len(found) in {0, size}
    if found:
        assert found[0] == 0
        assert set(found) == set(range(max(found) + 1))


# --- a connection that is announced, and not there -----------------------------------


@pytest.mark.parametrize("name", ["PMI_FD", "PMI_PORT"])
def test_a_process_manager_that_does_not_answer_is_named(name):
    value = {"PMI_FD": "99", "PMI_PORT": "127.0.0.1:1"}[name]
    environ = {"PMI_RANK": "0", "PMI_SIZE": "2", name: value}
    with pytest.raises(LaunchError, match=f"^{name}={value} does not") as caught:
        exchange_in_launch(environ)
    assert caught.value.code == "HPC138"
    assert exchange_in_launch(environ | {"PMI_SIZE": "1"}) is None  # nobody to talk to
    assert exchange_in_launch({"PMI_RANK": "0", "PMI_SIZE": "2"}) is None
