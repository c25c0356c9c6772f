"""``--rdzv-conf``, read by us and by the installed torch."""

from __future__ import annotations

import os
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import distributed
from torch.distributed.elastic.rendezvous import (
    RendezvousParameters,
    c10d_rendezvous_backend,
    dynamic_rendezvous,
    registry,
    static_tcp_rendezvous,
)
from torch.distributed.elastic.rendezvous.utils import _parse_rendezvous_config

from tests.support.processes import clean_environ, run
from tests.support.stock.side_by_side import COMMANDS, OURS, STOCK
from torchrun_hpc.errors import LaunchError, Setting
from torchrun_hpc.options import rdzv_conf

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.processes import Result

# They need no package beside torch.
BACKENDS = ("c10d", "static")
KEYS = (
    *("store_type", "is_host", "read_timeout", "timeout", "rank", "protocol", "x"),
    *("join_timeout", "last_call_timeout", "close_timeout"),
    *("heartbeat_timeout", "keep_alive_interval", "keep_alive_max_attempt"),
)
# Newer releases read these.
READS = dynamic_rendezvous.create_handler.__code__.co_consts
UNREAD = {
    key
    for key in KEYS[-3:]
    if key.partition("_timeout")[0] not in READS and key not in READS
}
VALUES = st.one_of(
    st.integers(-3, 3).map(str),
    st.integers(-(10**9), 10**9).map(str),
    st.integers(10**17, 10**19).map(str),
    st.sampled_from(["1.5", "'5'", "+5", "1_0", "_1", "٣", "five", "1e3", "0x5", "-0"]),
    st.sampled_from([*rdzv_conf.BOOLEANS, "True", "maybe", "2", "None"]),
    st.sampled_from(["tcp", "file", "FILE", "redis", "http", "a=b"]),
    st.text(st.characters(exclude_characters=",\0", codec="utf-8"), max_size=5),
)


# Torch does not export the name.
class UnopenedStore(distributed.Store):  # type: ignore[misc, name-defined]
    """Stands for all that torch opens after it has read the configuration."""

    def __init__(self, *_args: Any, **_options: Any) -> None:
        super().__init__()

    def compare_set(self, *_args: Any) -> bytes:
        return b""


@pytest.fixture(scope="module", autouse=True)
def _nothing_is_opened():
    with pytest.MonkeyPatch.context() as patched:
        for module in (c10d_rendezvous_backend, static_tcp_rendezvous):
            patched.setattr(module, "TCPStore", UnopenedStore)
        patched.setattr(c10d_rendezvous_backend, "FileStore", UnopenedStore)
        yield


def _torch_can_use(text: str, backend: str) -> bool:
    """Let torch read, and do what it does with the numbers soon after."""
    try:
        conf: dict[str, Any] = {"rank": 0, **_parse_rendezvous_config(text)}
        parameters = RendezvousParameters(backend, "localhost:0", "7", 1, 1, **conf)
        handler: Any = registry.get_rendezvous_handler(parameters)
        if backend == "static":
            return bool(handler.timeout > timedelta(0))
        read = handler.settings
        datetime.now() + read.timeout.last_call  # noqa: DTZ005
        interval, attempts = read.keep_alive_interval, read.keep_alive_max_attempt
        datetime.now() - interval * attempts  # noqa: DTZ005
    except (ValueError, TypeError, OverflowError):
        return False
    return interval > timedelta(0) and attempts > 0  # otherwise it waits forever


def _we_can_use(text: str, backend: str) -> bool:
    try:
        rdzv_conf.read(Setting(text, "--rdzv_conf"), backend)
    except LaunchError:
        return False
    return True


@settings(deadline=None, max_examples=400)
@given(st.sampled_from(BACKENDS), st.sampled_from(KEYS), VALUES)
def test_what_torch_can_use_passes_and_nothing_else(backend, key, value):
    text = f"{key}={value}"
    if key not in UNREAD:
        assert _we_can_use(text, backend) is _torch_can_use(text, backend)


@pytest.mark.parametrize("key", ["self", "backend", "endpoint", "min_nodes", "run_id"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_what_torch_passes_itself(key, backend):
    assert not _torch_can_use(f"{key}=1", backend)
    assert not _we_can_use(f"{key}=1", backend)


# Somebody's own backend, as a package that is installed.
THEIRS = """
from torch.distributed.elastic.rendezvous import RendezvousParameters, registry


def get_handler():
    return create


def create(given):
    assert given.config.items() >= CONF.items(), given.config
    parameters = RendezvousParameters(
        "c10d", "localhost:0", given.run_id, given.min_nodes, given.max_nodes,
        given.local_addr, is_host=True,
    )
    handler = registry._create_c10d_handler(parameters)
    handler.get_backend = lambda: "theirs"
    return handler


CONF = {"connect_timeout": "1.5", "store_type": "redis", "join_timeout": "soon"}
"""


takes_others = pytest.mark.skipif(
    not hasattr(registry, "_register_out_of_tree_handlers"),
    reason="this torch knows its own backends only",
)


def _launch_with_theirs(
    which: str, tmp_path: Path, module: str, *options: str
) -> Result:
    """Launch with somebody's own backend, as a package that is installed."""
    package = tmp_path / "theirs-1.0.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Name: theirs\nVersion: 1.0\n")
    entry = "[torchrun.handlers]\ntheirs = theirs:get_handler\n"
    (package / "entry_points.txt").write_text(entry)
    (tmp_path / "theirs.py").write_text(module)
    environ = clean_environ()
    environ["PYTHONPATH"] += f"{os.pathsep}{tmp_path}"
    words = ["--rdzv-backend=theirs", *options, "--no-python", "echo", "started"]
    return run([*COMMANDS[which], *words], environ=environ)


@takes_others
@pytest.mark.parametrize("which", [STOCK, OURS])
def test_somebodys_own_backend(which, tmp_path):
    conf = "--rdzv-conf=connect_timeout=1.5,store_type=redis,join_timeout=soon"
    done = _launch_with_theirs(which, tmp_path, THEIRS, conf)
    assert (done.code, done.out) == (0, "started\n"), done.err


# It cannot be made, or fails when the nodes meet.
REFUSES = """
def get_handler():
    return create


def create(given):
    {in_create}
    class Handler:
        use_agent_store = False
        def get_backend(self):
            return "theirs"
        def next_rendezvous(self):
            raise ValueError("later")
        def shutdown(self):
            return True
    return Handler()
"""


@takes_others
@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("given.get_as_int('interval')", "The rendezvous configuration option 'inter"),
        ("10.0 ** given.get_as_int('power')", "(34, 'Numerical result out of range')"),
    ],
)
def test_a_value_that_a_backend_cannot_use(line, fault, tmp_path):
    module = REFUSES.format(in_create=line)
    conf = "--rdzv-conf=interval=1.5,power=999"
    done = _launch_with_theirs(OURS, tmp_path, module, conf)
    *_, error = done.err.splitlines()
    assert "Traceback" not in done.err
    said = "--rdzv_conf=interval=1.5,power=999: --rdzv_backend=theirs"
    assert error.startswith(
        f"torchrun_hpc: error[HPC019]: {said} cannot use it: {fault}"
    )
    assert done.code == 2


@takes_others
@pytest.mark.parametrize(
    ("line", "options"), [("", ["--rdzv-conf=a=1"]), ("int('no number')", [])]
)
def test_a_fault_that_is_not_of_a_value(line, options, tmp_path):
    """It is raised later, or without the option: torch's traceback shows where."""
    module = REFUSES.format(in_create=line)
    done = _launch_with_theirs(OURS, tmp_path, module, *options)
    assert done.code == 1
    assert "ValueError: " in done.err
    assert "HPC019" not in done.err
