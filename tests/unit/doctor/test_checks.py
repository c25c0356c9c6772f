"""What is wrong with nodes, one by one: the codes, the nodes, and what is not wrong."""

from __future__ import annotations

import pytest
from doctor.reports import (
    HOSTS,
    SHM,
    make_folder,
    make_gpu,
    make_interface,
    make_nodes,
    make_torch,
    node_with,
)

from torchrun_hpc.doctor.checks import findings

CODES = {f"HPC{number}" for number in (181, 182, 184, 185, 186, 187, 188, 241)}


def faults(number, changes):
    """Return the findings of some nodes, without those that only compare them."""
    found = [*findings(make_nodes(number, changes), HOSTS[:number])]
    assert {finding.code for finding in found} <= CODES
    assert all(finding.text.isprintable() for finding in found)
    assert all(finding.remedy for finding in found)
    return [finding for finding in found if finding.code != "HPC181"]


def folder(path="/scratch", **changes):
    return {"folders": (make_folder(path, **changes),)}


def gpus(*changes):
    return {"gpus": tuple(make_gpu(**each) for each in changes)}


def named(**names):
    return {"names": names}


ETHERNET = make_interface("ib0", "10.20.0.3", is_up=False), make_interface("eth0")
LOCKED = node_with("limits", **{"locked memory": 65536})
FILES = node_with("limits", files=1024)
QUOTA = folder(problem="Disk quota exceeded")
MISSING = folder("/p/home", size=0, problem="No such file or directory")
TAKEN = {"memory_used": 3 * 2**30}
ECC = gpus({}, {"ecc_errors": 2}, {"ecc_errors": -1}, {})
BUSY = gpus({}, {"processes": [77, 5]}, {"processes": [77]}, {"processes": [9]})

# What is wrong with node 2 of 4, by what is said of it.
SUSPECT = {
    "HPC182 jwb0001i does not resolve": named(jwb0001i=[]),
    "HPC182 jwb0001i resolves to 10.10.0.1, ::2, but its address is 10.20.0.1": named(
        jwb0001i=["10.10.0.1", "::2"]
    ),
    "HPC182 jwb0003i resolves to 10.20.0.3, 192.0.2.7, but no": named(
        jwb0003i=["10.20.0.3", "192.0.2.7"]
    ),
    "HPC182 jwb0009i does not resolve": named(jwb0009i=[]),  # that has not come
    "HPC184 cannot write to /scratch: Disk quota exceeded": QUOTA,
    "HPC184 cannot write to /p/home: No such file or directory": MISSING,
    "HPC184 /scratch is full: less than 100 MB and 1 % are free": folder(free=99999999),
    "HPC187 GPU 1 has had 2 uncorrected memory errors": ECC,
    "HPC187 other processes compute on GPU 1-3: PID 5, 9, 77": BUSY,
    "HPC187 up to 3 GiB of memory are in use on GPU 1, by an unknown process": (
        gpus({"memory_used": 2**30}, TAKEN, TAKEN | {"memory": 200 * 2**30}, {})
    ),
}
ADVICE = {
    f"HPC184 {SHM} has 64 MiB, not enough for DataLoader's workers": folder(
        SHM, free=64 * 2**20, size=64 * 2**20
    ),
    "HPC185 importing torch took 41 s (median: 4 s)": node_with("torch", import_s=41.0),
    "HPC186 only 1024 files can be open (ulimit -Hn)": FILES,
    "HPC186 only 1023 processes and threads can run (ulimit -u)": node_with(
        "limits", processes=1023
    ),
    "HPC186 only 64 KiB can be locked (ulimit -l); RDMA needs more": LOCKED,
    "HPC187 torch sees 1 of 4 GPUs": node_with("torch", gpus=1),
    "HPC182 it sends to jwb0001i from 10.10.0.3, and not from 10.20.0.3": {
        "routes": {"jwb0001i": "10.10.0.3"}
    },
    "HPC182 no interface has an address for the job, so no pair was measured": {
        "address": ""
    },
    "HPC182 no route to jwb0001i": {"routes": {"jwb0001i": ""}},
    "HPC188 resolving node names takes more than 1 s": {"resolver_s": 1.1},
    "HPC241 the system gives connections ports from 15000 to 61000": {
        "local_ports": (15000, 61000),
        "reserved_ports": "1-19999,29000-65535",
    },
    "HPC241 20000-20009,25000 of the launcher's ports (20000 to 28999) are reserved": {
        "reserved_ports": "8080,19990-20009,25000"
    },
}


@pytest.mark.parametrize("said", SUSPECT | ADVICE)
def test_one_node(said):
    (finding,) = faults(4, {2: (SUSPECT | ADVICE)[said]})
    code, _, text = said.partition(" ")
    assert finding.code == code
    assert finding.text.startswith(f"jwb0003: {text}")
    assert finding.nodes == (2,)
    assert finding.is_suspect is (said in SUSPECT)


NOTHING = {
    "nothing": {},
    "an own name on loopback": named(jwb0003i=["127.0.1.1", "::1"]),
    "an own name of several addresses": named(jwb0003i=["10.20.0.3", "10.10.0.3"]),
    "one of several addresses": named(jwb0001i=["10.10.0.1", "10.20.0.1"]),
    "a name of a node that has not come": named(jwb0009i=["10.20.0.9"]),
    "little room in a small folder": folder(free=50 * 10**6, size=10**9),
    "a small part of a large folder": folder(free=2 * 10**9, size=10**12),
    "torch was not looked at": {"torch": None},
    "a limit": node_with("limits", files=4096),
    "no limit": node_with("limits", files=-1),
    "locked memory without InfiniBand": LOCKED | {"interfaces": ETHERNET},
    "ports that the system gives to nobody": {
        "local_ports": (15000, 61000),
        "reserved_ports": "20000-28999",
    },
    "unknown ports": {"local_ports": (0, 0)},
    "memory of a process": gpus({"memory_used": 2**30}),
    "names that take a moment": {"resolver_s": 0.9},
}


@pytest.mark.parametrize("case", NOTHING)
def test_nothing_is_wrong(case):
    assert faults(4, {2: NOTHING[case]}) == []


@pytest.mark.parametrize("number", [0, 1, 16])
def test_sound_nodes(number):
    assert [*findings(make_nodes(number), HOSTS[:16])] == []


# --- several nodes --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "is_suspect"),
    [
        (QUOTA, (True, True, True)),
        (MISSING, (True, False, False)),
        (FILES, (False, False, False)),
        (ECC, (True, True, True)),
    ],
)
def test_what_most_nodes_have_may_be_the_sites_choice(changes, is_suspect):
    """On one node of four; on three of them; on all."""
    found = [faults(4, dict.fromkeys(range(n), changes)) for n in (1, 3, 4)]
    assert tuple(finding.is_suspect for (finding,) in found) == is_suspect
    assert [finding.nodes for (finding,) in found] == [(0,), (0, 1, 2), ()]
    assert found[2][0].text.startswith("all 4 nodes: ")


def test_a_job_of_one_node():
    (finding,) = faults(1, {0: {"resolver_s": 1.1}})
    assert finding.text == "jwb0001: resolving node names takes more than 1 s"
    assert finding.nodes == (0,)
    assert not finding.is_suspect


def test_what_each_node_has_in_its_own_words_is_one_finding():
    changes = {n: folder(path=f"/scratch/n{n}", problem="No space") for n in range(8)}
    (finding,) = faults(8, changes)
    assert finding.nodes == ()
    assert finding.text.startswith("all 8 nodes: cannot write to /scratch/n0: ")


def test_nodes_of_different_faults():
    found = faults(4, {0: QUOTA, 1: folder(free=0), 3: QUOTA})
    assert [finding.nodes for finding in found] == [(0, 3), (1,)]
    assert found[0].text.startswith("jwb0001, jwb0004: ")


def test_others_may_use_GPUs_that_the_job_does_not_have():  # noqa: N802
    changes = gpus({"processes": (5,)}, TAKEN) | {"torch": make_torch(gpus=1)}
    busy, taken, hidden = faults(2, dict.fromkeys(range(2), changes))
    assert "compute on GPU 0" in busy.text
    assert "in use on GPU 1" in taken.text
    assert not busy.is_suspect
    assert not taken.is_suspect
    assert hidden.text == "all 2 nodes: torch sees 1 of 2 GPUs"


def test_not_too_many_processes():
    (finding,) = faults(2, {1: gpus(*[{"processes": [*range(50)]}] * 4)})
    assert finding.text.endswith("PID 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11 and 38 more")


def test_a_slow_import_needs_nodes_to_compare_with():
    slow = node_with("torch", import_s=100.0)
    assert faults(2, {1: slow}) == []
    assert faults(3, dict.fromkeys(range(3), slow)) == []
    assert len(faults(3, {1: slow})) == 1
    assert len(faults(4, {0: {"torch": None}, 1: slow})) == 1
