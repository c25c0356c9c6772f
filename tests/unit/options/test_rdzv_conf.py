"""The value of --rdzv-conf."""

from __future__ import annotations

import contextlib
import re

import pytest

from torchrun_hpc.errors import LaunchError, Setting
from torchrun_hpc.options import rdzv_conf
from torchrun_hpc.options.values import C10D


def conf(text):
    return Setting(text, "--rdzv_conf")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", {}),
        (" , ,", {}),
        ("a=1,b= 2 , c =3", {"a": "1", "b": "2", "c": "3"}),
        ("a=b=c,", {"a": "b=c"}),
        ("a=1,a=2", {"a": "2"}),
    ],
)
def test_pairs(text, expected):
    found = rdzv_conf.read(conf(text), "theirs")
    assert found.pairs == expected
    assert rdzv_conf.read(conf(found.filled()), "theirs") == found


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("", 120),
        ("keep_alive_interval=10", 120),
        ("keep_alive_interval=100", 300),
        ("keep_alive_max_attempt=6", 120),
        ("keep_alive_max_attempt=100", 500),
        ("keep_alive_interval=10,keep_alive_max_attempt=6", 60),
        ("keep_alive_interval=1,keep_alive_max_attempt=1", 5),
    ],
)
def test_how_long_an_agent_may_be_silent(text, seconds):
    assert rdzv_conf.read(conf(text), C10D).silence_timeout == seconds


def test_not_set():
    found = rdzv_conf.RdzvConf()
    assert (found.pairs, found.uses_file) == ({}, False)
    assert (found.is_host, found.join_timeout) == (None, None)
    assert found.filled(is_host=1) == "is_host=1"


UNREADABLE = [
    *("is_host", "a=1,b", "=1", "a=", "is_host=maybe", "is_host=2", "join_timeout=ten"),
    *("read_timeout=-1", "read_timeout=0", "read_timeout=1.5", "close_timeout='5'"),
    *("join_timeout=99999999999999999", "last_call_timeout=999999999999"),
    f"join_timeout={'9' * 5000}",
    *("store_type=hash", "keep_alive_interval=0", "keep_alive_max_attempt=1.5"),
    *("keep_alive_max_attempt=-1", "endpoint=n1:1", "self=1"),
]


def test_what_torch_could_not_read(golden):
    messages = {}
    for text in UNREADABLE:
        with pytest.raises(LaunchError) as caught:
            rdzv_conf.read(conf(text), "c10d")
        assert (caught.value.code, caught.value.everywhere) == ("HPC019", True), text
        assert str(caught.value).startswith(f"--rdzv_conf={text}: ")
        messages[text[:50]] = str(caught.value).removeprefix(f"--rdzv_conf={text}: ")
    messages = {text: re.sub("9{100,}", "9...", messages[text]) for text in messages}
    golden(messages)


# Wrong values, and the backends that read them.
READ_BY = {
    "timeout='5'": {"static"},
    "timeout=1.5": {"static"},
    "timeout=0": {"static"},
    "timeout=-5": {"static"},
    "foo_timeout=1.5": set(),
    "connect_timeout=1.5": set(),
    "rank=first": set(),
    "is_host=maybe": {"c10d"},
    "store_type=redis": {"c10d"},
    "store_type=file,is_host=maybe": set(),
    "store_type=file,read_timeout=0": set(),
    "read_timeout=0": {"c10d"},
    "join_timeout=1.5": {"c10d"},
    "heartbeat_timeout=x": {"c10d"},
    "keep_alive_interval=0": {"c10d"},
    "last_call_timeout=0": {"c10d"},
    "last_call_timeout=x": {"c10d"},
    "protocol=ftp": set(),
    # As Python reads a number.
    "join_timeout=+1_0,read_timeout=٣": set(),
    "timeout= 5 ": set(),
}
BACKENDS = ["c10d", "static", "etcd", "etcd-v2", "theirs"]


@pytest.mark.parametrize("text", READ_BY)
def test_what_a_backend_does_not_read_may_be_anything(text):
    for backend in BACKENDS:
        is_read = backend in READ_BY[text]
        error = pytest.raises(LaunchError, match=re.escape(f"--rdzv_conf={text}: "))
        with error if is_read else contextlib.nullcontext():
            rdzv_conf.read(conf(text), backend)


def test_what_is_set_stays():
    found = rdzv_conf.read(conf("is_host=0, x = y"), "c10d")
    filled = found.filled(is_host=1, join_timeout=900)
    assert filled == "is_host=0,x=y,join_timeout=900"


@pytest.mark.parametrize(
    ("text", "expected"),
    [("store_type=FILE", True), ("store_type=tcp", False), ("x=file", False)],
)
def test_a_store_in_a_file(text, expected):
    assert rdzv_conf.read(conf(text), "c10d").uses_file is expected
    assert not rdzv_conf.read(conf(text), "static").uses_file


@pytest.mark.parametrize(
    ("backend", "expected"), [("c10d", 12), ("static", None), ("theirs", None)]
)
def test_a_number_of_seconds_that_a_backend_reads(backend, expected):
    found = rdzv_conf.read(conf("join_timeout=12"), backend)
    assert found.join_timeout == expected
    assert rdzv_conf.read(conf("x=y"), backend).join_timeout is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        *((f"is_host={word}", True) for word in ("1", "true", "T", "yes", "Y")),
        *((f"is_host={word}", False) for word in ("0", "False", "f", "no", "n")),
        ("x=1", None),
        ("is_host=1,store_type=file", None),
    ],
)
def test_who_hosts(text, expected):
    assert rdzv_conf.read(conf(text), "c10d").is_host is expected
    assert rdzv_conf.read(conf(text), "static").is_host is None
