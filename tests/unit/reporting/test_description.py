"""A launch as plain data: nothing is lost on its way to another program."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import fields, replace

import pytest

from tests.support import ROOT
from tests.support.juelich import INTERACTIVE, JSC, juelich, outside_a_step, step
from tests.support.plans import NODE, make_inputs, make_plan
from torchrun_hpc import __version__, wire
from torchrun_hpc.host.topology import Core, Topology
from torchrun_hpc.planning.head_node import port_of
from torchrun_hpc.planning.inputs import Node
from torchrun_hpc.planning.meeting import Meeting
from torchrun_hpc.reporting import description, tables
from torchrun_hpc.schedulers.job import LaunchContext

PATCH = description.DescribedPatch(
    name="report_missing_nodes",
    target="torch.somewhere",
    reason="it waits",
    releases=">=2.0",
    state="patched",
)
TOPOLOGY = Topology(tuple(Core((cpu,)) for cpu in range(4)))
FOLDER = f"{ROOT}/"
COMMAND = ["torchrun", "--nnodes=3", "train.py", "--lr", "0.1"]


def described(inputs):
    """Return a description as plain data."""
    plan = make_plan(inputs)
    found = description.description(inputs.job, plan, "2.13.0", [PATCH], COMMAND)
    return json.loads(wire.to_line(wire.encode(found)))


def read(found, rank=0, here=None):
    """Return what another node makes of it, as plain data again."""
    sent = json.loads(json.dumps(found))
    received = description.received(sent, rank, here or HERE)
    return received and json.loads(wire.to_line(wire.encode(received)))


THREE_NODES = make_inputs()
HERE = make_plan(THREE_NODES).meeting
LAUNCHES = {
    "three nodes": THREE_NODES,
    "the last of three nodes": make_inputs(step(2)),
    "a name is rewritten": make_inputs(options={"rdzv_endpoint": "jwb0001:29400"}),
    "static": make_inputs(step(1), options={"node_rank": 1, "master_port": 29501}),
    "etcd": make_inputs(options={"rdzv_backend": "etcd", "rdzv_endpoint": "e:2379"}),
    "a rank that is ignored": make_inputs(
        options={"rdzv_backend": "c10d", "node_rank": 5}
    ),
    "an address of IPv6": make_inputs(
        step(nodes=("jwb0001", "jwb0002")),
        network=juelich(
            interfaces={"ib0": "fd00::1/64"},
            hosts={"jwb0001i": "fd00::1", "jwb0002i": "fd00::2"},
        ),
    ),
    "no address": make_inputs(network=juelich(interfaces={"eth0": "172.17.0.2/16"})),
    "too many workers": make_inputs(
        environ={"CUDA_VISIBLE_DEVICES": "0"}, node=replace(NODE, cpus=1)
    ),
    "bound": make_inputs(
        options={"hpc_bind": "even"}, node=replace(NODE, topology=TOPOLOGY, cpus=4)
    ),
    "standalone": make_inputs(options={"standalone": True}),
    "no site": make_inputs(site=None),
    "one node of a step": make_inputs(step(nodes=("jwb0001",))),
    "one node of a batch script": make_inputs(
        outside_a_step(LaunchContext.BATCH_SCRIPT, ("jwb0001",))
    ),
    "an interactive step": make_inputs(INTERACTIVE),
    "no scheduler": make_inputs(None),
    "no scheduler, two nodes": make_inputs(
        None, options={"nnodes": "2", "node_rank": 1, "master_addr": "10.10.0.1"}
    ),
}


@pytest.mark.parametrize("inputs", LAUNCHES.values(), ids=LAUNCHES)
def test_another_node_gets_all_values_and_their_sources(inputs):
    plan, found = make_plan(inputs), described(inputs)
    rank = plan.meeting.node_rank
    assert read(found, rank, plan.meeting) == found
    assert read(found, rank + 1, plan.meeting) is None
    of_another = Meeting("c10d", hosts=("n1", "n2", "n3", "n4"))
    assert read(found, rank, of_another) is None
    assert set(found["meeting"]) == {field.name for field in fields(plan.meeting)}
    assert set(found["options"]) == {*inputs.options.given, *plan.options}
    for name, option in found["options"].items():
        # A derived value replaces an explicit one: torchrun gets it.
        expected = plan.options.get(name) or inputs.options[name]
        assert option == {"value": str(expected.value), "source": expected.source}
    settings = [*found["options"].values(), *found["environment"].values()]
    assert all(setting["source"] for setting in settings)


def test_the_options_of_a_site_have_their_source():
    site = replace(JSC, options={"hpc_auth": "require", "hpc_key_file": "~/k"})
    found = described(make_inputs(site=site, options={"hpc_auth": "auto"}))["options"]
    assert found["hpc_auth"] == {"value": "auto", "source": "--hpc_auth"}
    assert found["hpc_key_file"] == {"value": "~/k", "source": "site jsc: key_file"}


def test_one_node_opens_no_port():
    inputs = make_inputs(None)
    assert described(inputs)["meeting"]["listen"] is None
    found = description.description(None, make_plan(inputs), "2.13.0", [], COMMAND)
    rows = [line.split() for line in tables.render([found], (), 0).splitlines()]
    assert ["rendezvous", *["within", "the", "agent,", "without", "a", "port"]] in rows
    assert not [row for row in rows if row[:2] == ["listens", "on"]]


def heard(changes, here=HERE):
    """Return what is made of a description of node 0 with these changes."""
    return read(described(THREE_NODES) | changes, here=here)


def in_part(part, **changes):
    """Change fields of a part."""
    return {part: described(THREE_NODES)[part] | changes}


# What two nodes call the nodes, where a launcher may tell no names.
NAMES = [
    (["n0", "n1"], ("n0", "n1"), True),
    (["n0", ""], ("n0", "n1"), True),
    (["n0", "n1"], ("", "n1"), True),
    (["n0", ""], ("", "n1"), True),
    (["", ""], ("", ""), True),
    (["n1", "n0"], ("n0", "n1"), True),
    (["n0"], ("n0", "n1"), False),
    (["n0", "n1", ""], ("n0", "n1"), False),
    ([], ("n0",), False),
]


@pytest.mark.parametrize(("theirs", "ours", "agree"), NAMES)
def test_names_may_be_in_another_order_but_not_of_another_number(theirs, ours, agree):
    here = replace(HERE, hosts=ours)
    assert (heard(in_part("meeting", hosts=theirs), here) is not None) is agree


@pytest.mark.parametrize("data", [None, "", "not one", [], {}, 1, 0.5, True])
def test_what_is_no_description(data):
    assert description.received(data, 0, HERE) is None


@pytest.mark.parametrize(
    "changes",
    [
        {"command": ["curl", "example.org"]},
        {"command": []},
        {"command": "torchrun"},
        {"exports": {"X=1; touch /tmp/x; Y": "v"}},
        {"exports": {"X": 1}},
        {"torch": "2\x1b]0;title\x07"},
        {"version": 2},
        in_part("meeting", local_address="\x1b[2J"),
        in_part("meeting", interface="two\nlines"),
        in_part("meeting", node_rank=True),
        in_part("meeting", node_rank=-1),
        in_part("messages", warnings=[{"code": "HPC057"}]),
        {"patches": [{}]},
        {"options": {"nnodes": "3"}},
    ],
    ids=str,
)
def test_what_a_stranger_may_have_written(changes):
    """Nothing of it gets to a terminal, or into a line that a user copies."""
    assert heard({}) is not None
    assert heard(changes) is None


def test_a_description(golden):
    """The data for another program, and the lines for a shell."""
    found = described(THREE_NODES)
    assert (found["torchrun_hpc"], found["torch"]) == (__version__, "2.13.0")
    assert found["python"] == ".".join(map(str, sys.version_info[:3]))
    assert found["meeting"]["listen"] == ["10.20.0.1", port_of("19.0")]
    stable = found | dict.fromkeys(("torchrun_hpc", "python"), "VERSION")
    lines = description.shell_lines(found["exports"], found["command"])
    golden({"JSON": json.dumps(stable, indent=1).replace(FOLDER, ""), "lines": lines})


@pytest.mark.parametrize(
    ("name", "kind", "codes"),
    [
        ("three nodes", "notes", []),
        ("a name is rewritten", "notes", ["HPC074"]),
        ("a rank that is ignored", "notes", ["HPC075"]),
        ("an interactive step", "notes", ["HPC073"]),
        ("no address", "warnings", ["HPC057"]),
        ("too many workers", "advice", ["HPC092"]),
    ],
)
def test_messages_have_their_codes(name, kind, codes):
    messages = described(LAUNCHES[name])["messages"][kind]
    assert [message["code"] for message in messages] == codes
    assert all(message["text"] for message in messages)


def test_the_dry_run_is_no_option_of_the_launch():
    options = {"hpc_dry_run": "json", "hpc_site": "jsc"}
    assert set(described(make_inputs(options=options))["options"]) >= {"hpc_site"}
    assert "hpc_dry_run" not in described(make_inputs(options=options))["options"]


@pytest.mark.parametrize(
    ("how", "workers", "source", "cpus"),
    [
        ("even", 2, "--hpc_bind", ["0-1", "2-3"]),
        ("gpu", 2, "--hpc_bind; divided evenly: neither", ["0-1", "2-3"]),
        ("even", 5, "--hpc_bind; binds nothing: 5 workers", []),
    ],
)
def test_the_cpus_of_workers(how, workers, source, cpus):
    inputs = make_inputs(
        options={"hpc_bind": how}, node=Node(workers, cpus=4, topology=TOPOLOGY)
    )
    plan = make_plan(inputs)
    found = description.description(inputs.job, plan, "2.13.0", [], COMMAND)
    text = tables.render([found], (), 0)
    rows = [re.split("  +", line) for line in text.splitlines()]
    (row,) = [row for row in rows if row[0] == "CPUs"]
    assert row[1] == how
    assert row[2].startswith(source)
    assert [row[1] for row in rows if row[2:3] == ["NUMA node 0"]] == cpus
