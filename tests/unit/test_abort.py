"""What is known of the meeting place when a launch fails early."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchrun_hpc import abort, grammar, network
from torchrun_hpc.abort import Known
from torchrun_hpc.errors import LaunchError
from torchrun_hpc.network import Interface

TYPED = {
    "nothing": (["main.py"], {}, {}),
    "both spellings": (
        ["--rdzv-endpoint=n9:1", "--rdzv_id", "x", "main.py"],
        {},
        {"rdzv_endpoint": "n9:1", "rdzv_id": "x"},
    ),
    "behind options that are not known": (
        ["--log-dir", "logs", "--nproc-per-node=gpu", "--nnodes", "2:3", "main.py"],
        {},
        {"nnodes": "2:3"},
    ),
    "variables": (
        ["--master-port=1"],
        {"PET_NNODES": "3", "PET_RDZV_ID": "", "PET_STANDALONE": "1"},
        {"nnodes": "3", "master_port": 1, "standalone": True},
    ),
    "a wrong value": (["--master-port=x", "--rdzv-id=y"], {}, {}),
    "a wrong variable": (["--rdzv-id=y"], {"PET_STANDALONE": "yes"}, {}),
    "no value": (["--rdzv-id"], {}, {}),
}


@pytest.mark.parametrize(("argv", "environ", "expected"), TYPED.values(), ids=TYPED)
def test_endpoint_options(monkeypatch, argv, environ, expected):
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    found = grammar.endpoint_options(argv)
    assert {name: option.value for name, option in found.items()} == expected


@given(st.lists(st.text()))
def test_no_command_line_is_too_wrong(argv):
    assert set(grammar.endpoint_options(argv)) <= set(grammar.ENDPOINT)


def test_without_a_job_a_fault_is_said_and_nothing_told(capfd, monkeypatch):
    monkeypatch.delenv("SLURM_PROCID", raising=False)
    abort.give_up(LaunchError("HPC018", "no torch"), Known(["main.py"]))
    assert capfd.readouterr().err == "torchrun_hpc: error: HPC018 no torch\n"


def addresses(text):
    return tuple(network._with_prefix(a, "255.255.255.0") for a in text.split())


PATHS = {
    "unknown": ("10.20.0.9", ""),
    "none": (None, ""),
    "down": ("10.20.0.1", "interface ib0 of this node, with 10.20.0.1, is down"),
    "another one is up": (
        "10.10.0.1",
        "tried from eth0 (10.10.0.1); up here, too: hsn0, hsn1",
    ),
}


@pytest.mark.parametrize(("address", "problem"), PATHS.values(), ids=PATHS)
def test_what_keeps_others_away(monkeypatch, address, problem):
    here = (
        Interface("lo", addresses("127.0.0.1")),
        Interface("eth0", addresses("10.10.0.1")),
        Interface("ib0", addresses("10.20.0.1"), up=False),
        Interface("hsn0", addresses("10.30.0.1")),
        Interface("hsn1", addresses("10.31.0.1")),
        Interface("docker0", ()),
    )
    monkeypatch.setattr(network, "_interfaces", lambda: here)
    assert network.path_problem(address) == problem
