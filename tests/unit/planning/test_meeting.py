"""The file of the user's key, and the launches that cannot check a key."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest

from tests.support.juelich import ONE_NODE_JOBS, ONE_NODE_STEP, step
from tests.support.plans import BLOCK, NODE, planned, planned_at, refused
from torchrun_hpc.errors import Message
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
        assert planned(step(rank), options=options, environ=environ).meeting.key == file


def test_a_site_has_the_file_for_all_users():
    defaults = {FILE: "~/k", AUTH: "require"}
    site = Site(
        "mine", centre="Mine", file="x", title="x", source="x", options=defaults
    )
    file = KeyFile("~/k", "site mine: key_file=~/k", "site mine: auth=require")
    assert planned(site=site).meeting.key == file
    options = {FILE: "/k", AUTH: "auto"}
    file = KeyFile("/k", source="--hpc_key_file=/k")
    assert planned(site=site, options=options).meeting.key == file


@pytest.mark.parametrize("job", [*ONE_NODE_JOBS.values(), None])
@pytest.mark.parametrize("auth", ["auto", "require"])
def test_one_node_has_no_key(job, auth):
    """Nobody can connect to what meets within a process."""
    assert planned(job, options={AUTH: auth}).meeting.key == KeyFile()


BY_HAND = {"nnodes": "2", "rdzv_backend": "c10d", "rdzv_endpoint": "10.10.0.1:1"}
STATIC = {"rdzv_backend": "static"}
UNFIT = replace(NODE, incompatible_patches=("agent",))

# The launches that meet by PyTorch's own means: where, the options, the backend.
TORCHS = {
    "c10d": (planned, {"hpc_rendezvous": "c10d"}, "c10d"),
    "a range": (planned, {"nnodes": "2:4"}, "c10d"),
    "others may join": (partial(planned, ONE_NODE_STEP), {"nnodes": "1:2"}, "c10d"),
    "static": (planned, STATIC, "static"),
    "etcd": (planned, {"rdzv_backend": "etcd-v2", "rdzv_endpoint": "e:1"}, "etcd-v2"),
    "one node by c10d": (partial(planned, None), {"rdzv_backend": "c10d"}, "c10d"),
    "machines": (partial(planned, None), BY_HAND, "c10d"),
    "PyTorch's agent": (planned, {"hpc_without_patches": "agent"}, "c10d"),
    "a torch that does not fit": (partial(planned, node=UNFIT), {}, "c10d"),
    "direct mode": (partial(planned_at, BLOCK, 1), {}, "direct mode"),
}


@pytest.mark.parametrize(("plan", "options", "how"), TORCHS.values(), ids=TORCHS)
def test_what_cannot_check_a_key(plan, options, how):
    plan(options=options)
    plan(options=options | {FILE: "/k"})
    text = f"--hpc_auth=require, but {how} cannot "
    error = refused("HPC239", text, plan, options=options | {AUTH: "require"})
    assert error.everywhere
    assert str(error).startswith(text)


ONE_NODE, NO_SCHEDULER = "on a world of one node", "without a scheduler"
NO_KEY = "because no node checks a key"

# Each way to meet: how it is planned, its options, and why an option has no effect: the
# kind of rendezvous, the required key, and its file. A number is an error's code.
ALONE = partial(planned, None)
IN_STEP = partial(planned, ONE_NODE_STEP)
EFFECTS = {
    "several nodes": (planned, {}, (None, None, None)),
    "no key": (planned, {AUTH: "none"}, (None, None, NO_KEY)),
    "PyTorch's c10d": (planned, {"rdzv_conf": "store_type=file"}, (126, 239, NO_KEY)),
    "static": (planned, STATIC, (126, 239, NO_KEY)),
    "patched c10d": (partial(planned, node=UNFIT), {}, (126, 239, NO_KEY)),
    "one node": (ALONE, {}, (ONE_NODE, ONE_NODE, NO_KEY)),
    "one node of a step": (IN_STEP, {}, (ONE_NODE, ONE_NODE, NO_KEY)),
    "one node of a step by static": (IN_STEP, STATIC, (126, 239, NO_KEY)),
    "standalone": (planned, {"standalone": True}, (ONE_NODE, ONE_NODE, NO_KEY)),
    "one node by c10d": (ALONE, {"rdzv_backend": "c10d"}, (ONE_NODE, 239, NO_KEY)),
    "one node by static": (ALONE, STATIC, (ONE_NODE, 239, NO_KEY)),
    "machines by c10d": (ALONE, BY_HAND, (NO_SCHEDULER, 239, NO_KEY)),
    "machines by static": (ALONE, BY_HAND | STATIC, (NO_SCHEDULER, 239, NO_KEY)),
    "direct mode": (partial(planned_at, BLOCK, 1), {}, (DIRECT_MODE, 239, NO_KEY)),
    "direct mode on one node": (
        partial(planned_at, [0, 0], 1), {}, (DIRECT_MODE, 239, NO_KEY)
    ),
}  # fmt: skip
ASKED = [("hpc_rendezvous", "scheduler"), (AUTH, "require"), (FILE, "a/relative/key")]


@pytest.mark.parametrize(("plan", "others", "effects"), EFFECTS.values(), ids=EFFECTS)
def test_where_an_option_has_an_effect(plan, others, effects):
    for (name, value), effect in zip(ASKED, effects, strict=True):
        options = others | {name: value}
        if isinstance(effect, int):
            refused(f"HPC{effect}", "", plan, options=options)
            continue
        note = Message("HPC077", f"--{name}={value} has no effect {effect}")
        notes = plan(options=options).messages.notes
        assert notes == ((note,) if effect else ())
        # A module may set the variable for all jobs.
        environ = {f"PET_{name.upper()}": value}
        assert plan(options=options, environ=environ).messages.notes == ()
