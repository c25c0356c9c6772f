"""Files that torch has written because NCCL timed out."""

from __future__ import annotations

import os
import pickle
import resource
import subprocess
import sys
import time
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.patience import PATIENCE
from tests.support.stack_samples import entry, worker
from torchrun_hpc import wire
from torchrun_hpc.stacks import calls
from torchrun_hpc.stacks.calls import Call, Group

DUMP = """
import sys, torch
from torch import distributed
distributed.init_process_group(
    "gloo", store=distributed.HashStore(), rank=0, world_size=1
)
for _ in range(2500):
    distributed.all_reduce(torch.ones(4, 2))
dump = getattr(torch._C._distributed_c10d, "_dump_fr_trace", bytes)
sys.stdout.buffer.write(dump())
"""
TRACE = {"version": "2.10", "pg_config": {}, "entries": [entry(1), entry(2)]}
CALLS = (Call(1, "all_reduce", "float32[1024]"), Call(2, "all_reduce", "float32[1024]"))
RANK_5 = replace(worker(7), started=0.0)
PREFIXES = {
    "TORCH_FR_DUMP_TEMP_FILE": "/named_",
    "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": "/old_",
    "XDG_CACHE_HOME": "/torch/comm_lib_trace_rank_",
    "HOME": "/.cache/torch/comm_lib_trace_rank_",
}


@pytest.fixture
def written(tmp_path):
    """Write a dump of rank 5; return the environment that leads to it."""

    def written(variable="TORCH_FR_DUMP_TEMP_FILE", content=None):
        prefix = str(tmp_path) + PREFIXES[variable]
        os.makedirs(os.path.dirname(prefix), exist_ok=True)  # noqa: PTH103, PTH120
        content = pickle.dumps(TRACE, protocol=2) if content is None else content
        (tmp_path / f"{prefix}5").write_bytes(content)
        is_prefix = variable.endswith("_FILE")
        return {"HOME": "/none", variable: prefix if is_prefix else str(tmp_path)}

    return written


@pytest.mark.parametrize("variable", PREFIXES)
def test_where_they_are(written, variable):
    environ = written(variable)
    (group,) = calls.groups_in_dump(RANK_5, environ)
    assert (group.name, group.calls) == ("0", CALLS)
    assert calls.groups_in_dump(replace(RANK_5, rank=4), environ) == ()


def test_an_old_one_belongs_to_another_job_or_attempt(written, tmp_path):
    environ = written()
    later = replace(RANK_5, started=(tmp_path / "named_5").stat().st_mtime + 1)
    assert calls.groups_in_dump(later, environ) == ()


def test_another_users_is_not_read(written, monkeypatch):
    environ = written()
    monkeypatch.setattr(os, "getuid", lambda: os.geteuid() + 1)
    assert calls.groups_in_dump(RANK_5, environ) == ()


def test_links_are_not_followed(written, tmp_path):
    environ = written()
    (tmp_path / "named_5").rename(tmp_path / "elsewhere")
    (tmp_path / "named_5").symlink_to(tmp_path / "elsewhere")
    assert calls.groups_in_dump(RANK_5, environ) == ()


class Hostile:
    """Runs a function when it is read."""

    def __reduce__(self):
        return (print, ("run",))


def nested(levels=60):
    """Return a list that has 2 ** levels empty ones, in a few bytes of a pickle."""
    lists: list[Any] = []
    for _ in range(levels):
        lists = [lists, lists]
    return lists


def deep(levels=10**5):
    """Return the pickle of a dump with lists in lists as a field."""
    before, _, after = written_with(group="x").partition(b"X\x01\x00\x00\x00x")
    return before + b"]" * levels + b"a" * (levels - 1) + after


def written_with(**changes):
    return pickle.dumps({"entries": [entry(1, **changes)]}, protocol=2)


CONTENTS = {
    "nothing": b"",
    "no pickle": b"text",
    "only its begin": b"\x80\x02",
    "another value": pickle.dumps(7),
    "entries that are none": pickle.dumps({"entries": 7}),
    "an entry without fields": pickle.dumps({"entries": [{}]}),
    "a function": pickle.dumps([Hostile()]),
    "a text as a group": written_with(process_group="0"),
    "a number as a name": written_with(profiling_name=7),
    "a number as a group": written_with(process_group=[7, "x"]),
    "a list as a description": written_with(process_group=["0", []]),
    "a text as a number": written_with(collective_seq_id="1"),
    "a text as a size": written_with(input_sizes=[["1"]]),
    "a long number": written_with(collective_seq_id=10**5000),
    "marks": b"\x80\x02" + b"(" * 10**6 + b".",
    # These need gigabytes, or years.
    "an index": b"\x80\x02]r\x00\x00\x00\x10.",
    "the last index": b"\x80\x02]r\xff\xff\xff\xff.",
    "a length": b"\x80\x05\x96\x00\x00\x00\x00\x04\x00\x00\x00.",
    "lists": b"]" * 2**24,
    "many sizes": written_with(input_sizes=[[]] * 2**22),
    "nested lists as a size": written_with(input_sizes=[[nested()]]),
    "nested lists as a name": written_with(profiling_name=nested()),
    "nested lists as a group": written_with(process_group=[nested(), nested()]),
    "lists in lists": deep(),
}


@pytest.mark.parametrize("case", CONTENTS)
def test_any_content(written, case, capfd):
    """No memory and no time beyond the limits, whatever a file has."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    own = time.thread_time()
    assert calls.groups_in_dump(RANK_5, written(content=CONTENTS[case])) == ()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 4
    assert after.ru_maxrss < 2**20  # KiB, of the largest child
    assert time.thread_time() - own < 4
    assert capfd.readouterr() == ("", "")


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
    lambda each: st.lists(each) | st.tuples(each) | st.dictionaries(st.text(), each),
    max_leaves=5,
)
VALID = written_with()


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_any_value_and_any_byte(written, data):
    if data.draw(st.booleans()):
        field = data.draw(st.sampled_from([*entry(1)]))
        content = written_with(**{field: data.draw(VALUES)})
    else:
        start, end = (data.draw(st.integers(0, len(VALID))) for _ in range(2))
        content = VALID[:start] + data.draw(st.binary(max_size=9)) + VALID[end:]
    for group in calls.groups_in_dump(RANK_5, written(content=content)):
        assert wire.decode(Group, wire.encode(group)) == group


def test_the_dump_of_this_torch(written):
    """With gloo since torch 2.11, and with all that torch writes beside our fields."""
    done = subprocess.run(
        [sys.executable, "-c", DUMP],
        env={**os.environ, "TORCH_FR_BUFFER_SIZE": "3000"},
        capture_output=True,
        timeout=PATIENCE,
        check=True,
    )
    if not done.stdout:
        pytest.skip("this torch has no dump for gloo")
    (group,) = calls.groups_in_dump(RANK_5, written(content=done.stdout))
    dumped = [(call.number, str(call)) for call in group.calls]
    assert dumped == [(n, "all_reduce (float32[4,2])") for n in (2498, 2499, 2500)]
