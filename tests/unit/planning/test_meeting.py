"""Where the user's key is, and who cannot check one."""

from __future__ import annotations

from functools import partial

import pytest

from tests.support.juelich import INTERACTIVE
from tests.support.plans import BLOCK, ONE_NODE_JOBS, planned, planned_at
from torchrun_hpc.errors import LaunchError, Message
from torchrun_hpc.planning.meeting import KeyFile
from torchrun_hpc.planning.messages import DIRECT_MODE
from torchrun_hpc.sites import Site

AUTH, FILE = "hpc_auth", "hpc_key_file"
HOME = "~/.config/torchrun_hpc/key"

# Options, the environment, and where the key is.
FILES = [
    ({}, {}, KeyFile(HOME)),
    ({AUTH: "auto"}, {"HOME": "/home/me"}, KeyFile(HOME)),
    ({}, {"XDG_CONFIG_HOME": "/x"}, KeyFile("/x/torchrun_hpc/key")),
    ({}, {"XDG_CONFIG_HOME": "x"}, KeyFile(HOME)),  # a relative path does not count
    ({}, {"XDG_CONFIG_HOME": ""}, KeyFile(HOME)),
    ({FILE: "/k"}, {"XDG_CONFIG_HOME": "/x"}, KeyFile("/k", "--hpc_key_file=/k")),
    ({FILE: "~/k"}, {}, KeyFile("~/k", source="--hpc_key_file=~/k")),
    ({AUTH: "require"}, {}, KeyFile(HOME, required="--hpc_auth=require")),
    ({AUTH: "none", FILE: "/k"}, {}, KeyFile()),
    ({"hpc_dry_run": "json"}, {}, KeyFile(HOME, may_make=False)),
]


@pytest.mark.parametrize(("options", "environ", "file"), FILES)
def test_where_the_key_is(options, environ, file):
    for rank in 0, 2:
        assert planned(rank, options=options, environ=environ).meeting.key == file


def test_a_site_has_the_file_for_all_users():
    defaults = {FILE: "~/k", AUTH: "require"}
    site = Site(
        "mine", centre="Mine", file="x", title="x", source="x", options=defaults
    )
    file = KeyFile("~/k", "site mine: key_file=~/k", "site mine: auth=require")
    assert planned(site=site).meeting.key == file
    typed = {FILE: "/k", AUTH: "auto"}
    file = KeyFile("/k", source="--hpc_key_file=/k")
    assert planned(site=site, options=typed).meeting.key == file


ALONE = [*ONE_NODE_JOBS.values(), INTERACTIVE, None]


@pytest.mark.parametrize("job", ALONE)
@pytest.mark.parametrize("auth", ["auto", "require"])
def test_one_node_has_no_key(job, auth):
    """Nobody can connect to what meets within a process."""
    assert planned(job=job, options={AUTH: auth}).meeting.key == KeyFile()


# What meets by torch's own means.
TORCHS = {
    "its c10d": ({"hpc_rendezvous": "c10d"}, {}, "c10d"),
    "a range": ({"nnodes": "2:4"}, {}, "c10d"),
    "one node that others may join": (
        {"nnodes": "1:2"}, {"job": ONE_NODE_JOBS["step"]}, "c10d"
    ),
    "static": ({"rdzv_backend": "static"}, {}, "static"),
    "etcd": ({"rdzv_backend": "etcd-v2", "rdzv_endpoint": "e:1"}, {}, "etcd-v2"),
    "one node by c10d": (
        {"rdzv_backend": "c10d"}, {"job": None}, "c10d",
    ),
    "machines": (
        {"nnodes": "2", "rdzv_backend": "c10d", "rdzv_endpoint": "10.10.0.1:29400"},
        {"job": None}, "c10d",
    ),
    "an agent of torch's": (
        {"hpc_without_patches": "agent"}, {}, "c10d"
    ),
    "a torch that does not fit": (
        {}, {"incompatible_patches": ("agent",)}, "c10d"
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", TORCHS)
def test_what_cannot_check_a_key(case):
    options, changes, how = TORCHS[case]
    planned(options=options, **changes)
    with pytest.raises(LaunchError) as caught:
        planned(options=options | {AUTH: "require"}, **changes)
    assert (caught.value.code, caught.value.everywhere) == ("HPC239", True)
    assert str(caught.value).startswith(f"--hpc_auth=require, but {how} cannot ")


def test_direct_mode_cannot_either():
    for options in {}, {FILE: "/k"}:
        planned_at(BLOCK, 1, options=options)
    with pytest.raises(LaunchError, match="but direct mode cannot") as caught:
        planned_at(BLOCK, 1, options={AUTH: "require"})
    assert caught.value.code == "HPC239"


ONE_NODE, NO_SCHEDULER = "on a world of one node", "without a scheduler"
NO_KEY = "because no node checks a key"
STATIC = {"rdzv_backend": "static"}
BY_HAND = {"nnodes": "2", "rdzv_backend": "c10d", "rdzv_endpoint": "10.10.0.1:1"}
STEP = {"job": ONE_NODE_JOBS["step"]}

# Each way to meet: its options, its job or tasks, and why an option has no effect: the
# kind of rendezvous, the required key, and its file. A number is an error's code.
EFFECTS = {
    "several nodes": ({}, {}, (None, None, None)),
    "no key": ({AUTH: "none"}, {}, (None, None, NO_KEY)),
    "torch's c10d": ({"rdzv_conf": "store_type=file"}, {}, (126, 239, NO_KEY)),
    "static": (STATIC, {}, (126, 239, NO_KEY)),
    "patched c10d": ({}, {"incompatible_patches": ("agent",)}, (126, 239, NO_KEY)),
    "one node": ({}, {"job": None}, (ONE_NODE, ONE_NODE, NO_KEY)),
    "one node of a step": ({}, STEP, (ONE_NODE, ONE_NODE, NO_KEY)),
    "one node of a step by static": (STATIC, STEP, (126, 239, NO_KEY)),
    "standalone": ({"standalone": True}, {}, (ONE_NODE, ONE_NODE, NO_KEY)),
    "one node by c10d": (
        {"rdzv_backend": "c10d"}, {"job": None}, (ONE_NODE, 239, NO_KEY)
    ),
    "one node by static": (STATIC, {"job": None}, (ONE_NODE, 239, NO_KEY)),
    "machines by c10d": (BY_HAND, {"job": None}, (NO_SCHEDULER, 239, NO_KEY)),
    "machines by static": (
        BY_HAND | STATIC, {"job": None}, (NO_SCHEDULER, 239, NO_KEY)
    ),
    "direct mode": ({}, BLOCK, (DIRECT_MODE, 239, NO_KEY)),
    "direct mode on one node": ({}, [0, 0], (DIRECT_MODE, 239, NO_KEY)),
}  # fmt: skip
ASKED = [{"hpc_rendezvous": "scheduler"}, {AUTH: "require"}, {FILE: "a/relative/key"}]


@pytest.mark.parametrize("case", EFFECTS)
def test_where_an_option_has_an_effect(case):
    options, where, effects = EFFECTS[case]
    is_direct = isinstance(where, list)
    by = partial(planned_at, where, 1) if is_direct else partial(planned, **where)
    for asked, effect in zip(ASKED, effects, strict=True):
        ((name, value),) = asked.items()
        if isinstance(effect, int):
            with pytest.raises(LaunchError) as caught:
                by(options=options | asked)
            assert caught.value.code == f"HPC{effect}"
            continue
        note = Message("HPC077", f"--{name}={value} has no effect {effect}")
        notes = by(options=options | asked).messages.notes
        assert notes == ((note,) if effect else ())
        # A module may set the variable for all jobs.
        environ = {f"PET_{name.upper()}": value}
        notes = by(options=options | asked, environ=environ).messages.notes
        assert notes == ()
