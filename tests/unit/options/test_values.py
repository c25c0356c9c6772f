"""The value of each option: how it is read, and what is said of a wrong one."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.plans import explicit
from torchrun_hpc.options.options import READERS, read

# Explicit values, and their meanings.
GOOD: dict[str, dict[Any, Any]] = {
    "nnodes": {
        **dict.fromkeys(("1", "01", " 1", "+1", "1 ", "1:1", "1 : +1"), (1, 1)),
        "4": (4, 4),
        "2:4": (2, 4),
        "999999999": (999999999, 999999999),
    },
    "nproc_per_node": {
        "1": 1,
        "16": 16,
        16: 16,
        str(2**22): 2**22,
        **{word: word for word in ("gpu", "cpu", "auto", "many", "1.5", "")},
    },
    "rdzv_backend": {name: name for name in ("c10d", "static", "etcd-v2", "mine")},
    "max_restarts": {0: 0, 3: 3, 10**9 - 1: 10**9 - 1},
    **{
        name: {0: 0, -1: -1, 10**9 - 1: 10**9 - 1}
        for name in ("node_rank", "shutdown_timeout")
    },
    "monitor_interval": {0.1: 0.1, 5: 5.0, 1e-9: 1e-9, 1e6: 1e6},
    "master_port": {0: 0, 1: 1, 29500: 29500, 65535: 65535},
    "signals_to_handle": {
        "": (),
        "SIGTERM": ("SIGTERM",),
        "SIGTERM, SIGUSR1,": ("SIGTERM", "SIGUSR1"),
        "SIGNONE": ("SIGNONE",),  # of which torch warns
    },
    "hpc_site": {"jsc": "jsc", "none": "none", "./a.toml": "./a.toml"},
    "hpc_omp_threads": {"auto": "auto", "1": 1, "3": 3, "999999": 999999},
    "hpc_bind": {word: word for word in ("gpu", "even", "none")},
    "hpc_auth": {word: word for word in ("auto", "require", "none")},
    "hpc_key_file": {"~/a b": "~/a b"},
    "hpc_read_ahead": {word: word for word in ("auto", "none")},
    "hpc_rendezvous": {word: word for word in ("auto", "scheduler", "c10d")},
    "hpc_preload": {
        "none": (),
        "torch": ("torch",),
        "torch,torch.nn, numpy": ("torch", "torch.nn", "numpy"),
        "größe": ("größe",),
    },
    "hpc_stall_report": {"1": 1, "600": 600, "9999999": 9999999, "none": 0},
    **{
        name: {"0": 0, "00": 0, "4": 4, "004": 4, "999999": 999999}
        for name in ("hpc_spares", "hpc_spare_after", "hpc_health_check_timeout")
    },
    "hpc_health_check": {"dcgmi diag -r 1": "dcgmi diag -r 1"},
    "hpc_outcome": {"/a b/c": "/a b/c"},
    "hpc_without_patches": {
        "": (),
        "agent": ("agent",),
        " agent, host_name ,": ("agent", "host_name"),
    },
    "hpc_dry_run": {"table": "table", "json": "json"},
}

NO_WHOLE = ("", "x", "-1", "+1", "1.5", "1 ", "2:3", "0x1", "²", "٣", "1234567")
NO_NODES = ("", "0", "0:3", "3:2", "-1", "1:", ":3", "1:2:3", "two", "1.0", "٣", "3 4")
NO_THREADS = ("", "0", "-1", "1.5", "two", "AUTO", "auto ", " 2", "2,3", "1234567", "٣")
NO_SECONDS = (
    *("0", "00600", "-1", "+5", "1.5", "1e3", "10s", "ten", "", " 5", "10000000"),
    *("None", "off"),
)
NO_MODULES = ("", "torch,", "torch;numpy", "torch numpy", "1a", "a..b", "./a.py", ",")
NO_ENDPOINTS = (
    *("jwb0001:port", "jwb0001:65536", "jwb0001:29400x", "jwb0001:", ":29400"),
    *("a b:29400", "http://jwb0001:29400", "[jwb0001]:29400", "[10.20.0.1"),
    *("fd00::1]:29400", "jwb0001:٢٩٤٠٠", "jwb0001:000080", "a:1:2", " "),
)
BAD: dict[str, tuple[object, ...]] = {
    "nnodes": NO_NODES,
    "nproc_per_node": ("0", "-1", 0, "-٣", "20000000", "9" * 21),
    "rdzv_backend": ("scheduler", "direct"),
    "max_restarts": (-1, -(10**20), 10**9, 10**20),
    "node_rank": (10**9, 10**20, -(10**20)),
    "shutdown_timeout": (10**9, 10**20),
    "monitor_interval": (0, -1, -0.1, 1e300, float("inf"), float("nan")),
    "master_port": (-1, 65536, 99999),
    "signals_to_handle": (
        *(
            "SIGTERM, SIGKILL",
            "SIGTERM, SIGSTOP",
            "SIGTERM, signal",
            "SIGTERM, __doc__",
        ),
    ),
    "rdzv_endpoint": NO_ENDPOINTS,
    "master_addr": NO_ENDPOINTS,
    "hpc_omp_threads": NO_THREADS,
    "hpc_bind": ("GPU", "gpus", "cores", "0-3"),
    "hpc_auth": ("required",),
    "hpc_read_ahead": ("off", "torch"),
    "hpc_rendezvous": ("c10", "Scheduler", "static", "etcd"),
    "hpc_preload": NO_MODULES,
    "hpc_stall_report": NO_SECONDS,
    "hpc_spares": NO_WHOLE,
    "hpc_spare_after": NO_WHOLE,
    "hpc_health_check_timeout": NO_WHOLE,
    "hpc_dry_run": ("x", "jso"),
}


@pytest.mark.parametrize("name", GOOD)
def test_what_can_be_used(name):
    for text, expected in GOOD[name].items():
        found = read(explicit({name: text}))
        assert (getattr(found, name), found.problem) == (expected, None), text
        assert name in found, text
        assert str(found[name]) == f"--{name}={text}", text


def refusal_of(name, value, *, has_job):
    """Return the message about a wrong value; the option keeps its default."""
    found = read(explicit({name: value}), has_job=has_job)
    problem = found.problem
    assert problem is not None, (name, value)
    assert (problem.code, problem.everywhere) == ("HPC014", True), (name, value)
    assert str(problem).startswith(f"--{name}={value}"), (name, value)
    assert [*found.wrong] == [name], (name, value)
    assert name not in found.without(name), (name, value)
    # The field of the endpoint is its text.
    field = "endpoint" if name == "rdzv_endpoint" else name
    assert getattr(found, field, None) == getattr(read({}), field, None), (name, value)
    return str(problem).replace(f"={value}", "=VALUE", 1)


def test_what_cannot_be_used(golden):
    """It is the same in all modes, with a job and without."""
    texts = {}
    for name, values in BAD.items():
        wrong: dict[str, list[str]] = {}
        for value in values:
            message = refusal_of(name, value, has_job=True)
            assert refusal_of(name, value, has_job=False) == message
            wrong.setdefault(message, []).append(repr(value))
        texts[name] = [f"{', '.join(wrong[text])}\n    {text}" for text in wrong]
    golden(texts)


def test_every_reader_has_good_values():
    assert READERS.keys() <= GOOD.keys()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("n1", ("n1", None)),
        ("n1:0", ("n1", 0)),
        (" n1.site:29400 ", ("n1.site", 29400)),
        ("n_1-x:65535", ("n_1-x", 65535)),
        ("10.20.0.1", ("10.20.0.1", None)),
        ("10.20.0.1:00001", ("10.20.0.1", 1)),
        ("fd00::1", ("fd00::1", None)),
        ("[fd00::1]", ("fd00::1", None)),
        ("[fd00::1]:29400", ("fd00::1", 29400)),
    ],
)
def test_endpoints(text, expected):
    for name in "rdzv_endpoint", "master_addr":
        found = read(explicit({name: text}))
        assert (found.endpoint, found.problem) == (expected, None)
        assert str(found.endpoint_setting) == f"--{name}={text}"


def test_workers_are_bound_once():
    options = {"hpc_bind": "gpu", "numa_binding": "node"}
    found = read(explicit(options)).problem
    assert found is not None
    assert (found.code, found.everywhere) == ("HPC220", True)
    assert str(found).startswith("--hpc_bind=gpu and --numa_binding=node ")
    assert read(explicit(options | {"hpc_bind": "none"})).problem is None
