"""Files that torch has written because NCCL timed out."""

from __future__ import annotations

import os
import pickle
from dataclasses import replace

import pytest
from inspected import entry, worker

from torchrun_hpc.stacks import dumps
from torchrun_hpc.stacks.calls import Call

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
    (group,) = dumps.groups(RANK_5, environ)
    assert (group.name, group.calls) == ("0", CALLS)
    assert dumps.groups(replace(RANK_5, rank=4), environ) == ()


def test_an_old_one_belongs_to_another_job_or_attempt(written, tmp_path):
    environ = written()
    later = replace(RANK_5, started=(tmp_path / "named_5").stat().st_mtime + 1)
    assert dumps.groups(later, environ) == ()


def test_another_users_is_not_read(written, monkeypatch):
    environ = written()
    monkeypatch.setattr(dumps.os, "getuid", lambda: os.geteuid() + 1)
    assert dumps.groups(RANK_5, environ) == ()


def test_links_are_not_followed(written, tmp_path):
    environ = written()
    (tmp_path / "named_5").rename(tmp_path / "elsewhere")
    (tmp_path / "named_5").symlink_to(tmp_path / "elsewhere")
    assert dumps.groups(RANK_5, environ) == ()


class Hostile:
    """Runs a function when it is read."""

    def __reduce__(self):
        return (print, ("run",))


@pytest.mark.parametrize(
    "content",
    [
        *(b"", b"text", b"\x80\x02", pickle.dumps(7), pickle.dumps({"entries": 7})),
        *(pickle.dumps({"entries": [{}]}), pickle.dumps([Hostile()])),
        pickle.dumps({"entries": [{**entry(1), "process_group": "0"}]}),
        pickle.dumps({"entries": [{**entry(1), "collective_seq_id": "1"}]}),
        b"\x80\x02" + b"(" * 10**6 + b".",
    ],
)
def test_any_content(written, content, capsys):
    assert dumps.groups(RANK_5, written(content=content)) == ()
    assert capsys.readouterr().out == ""
