"""The variables of gloo, of NCCL, and of the site: whose value is taken."""

from __future__ import annotations

import ipaddress
from dataclasses import replace

import pytest

from tests.support.detection import changed
from tests.support.juelich import INTERACTIVE, juelich, outside_a_step, step
from tests.support.plans import NODE, make_inputs, make_plan
from torchrun_hpc.errors import Message, Setting
from torchrun_hpc.host.resolver import Resolver
from torchrun_hpc.planning import network_env
from torchrun_hpc.schedulers.job import LaunchContext
from torchrun_hpc.sites import Site
from torchrun_hpc.sites.profile import Profile
from torchrun_hpc.variables import FAULT_HANDLER, GLOO, NCCL

IB0 = ipaddress.ip_address("10.20.0.1")
OWNER = "ib0 has 10.20.0.1"
SITE = "site here"


def centre(gloo=None, nccl=None, **documented):
    """Describe a computing centre by the variables that it documents."""
    return Site(
        name="here",
        title="Here",
        centre="A centre",
        source="https://centre.example",
        file="/etc/here.toml",
        variables=changed(documented, {GLOO: gloo, NCCL: nccl}),
    )


def network(site, environ=None, address=IB0, interfaces=None):
    inputs = make_inputs(
        site=site, environ=environ or {}, network=juelich(interfaces=interfaces)
    )
    found = network_env.network(inputs, address)
    return {name: (value.value, value.source) for name, value in found.items()}


# The site's variables, the user's, and the planned ones.
NETWORK = {
    "no site": (None, {}, {GLOO: ("ib0", OWNER)}),
    "a site without variables": (centre(), {}, {GLOO: ("ib0", OWNER)}),
    "the site's interface": (centre("eth0"), {}, {GLOO: ("eth0", SITE)}),
    "the user's": (centre("eth0", "ib"), {GLOO: "lo"}, {NCCL: ("ib", SITE)}),
    "an empty variable": (centre("eth0"), {GLOO: ""}, {GLOO: ("eth0", SITE)}),
    "several interfaces": (centre("eth0,ib0"), {}, {GLOO: ("eth0,ib0", SITE)}),
    "other variables": (
        centre(NCCL_IB_TIMEOUT="20", FI_CXI_ATS="0", NCCL_NET="AWS Libfabric"),
        {"NCCL_IB_TIMEOUT": "50", "FI_CXI_ATS": ""},
        {
            GLOO: ("ib0", OWNER),
            "FI_CXI_ATS": ("0", SITE),
            "NCCL_NET": ("AWS Libfabric", SITE),
        },
    ),
}


@pytest.mark.parametrize(("site", "environ", "expected"), NETWORK.values(), ids=NETWORK)
def test_the_users_value_the_sites_the_derived_one(site, environ, expected):
    assert network(site, environ) == expected


# Interfaces, none of which is an ib*: NCCL would not find them by itself.
HSN = {
    "lo": "127.0.0.1/8",
    "hsn0": "10.20.0.1/16",
    "hsn1": "10.20.1.1/16",
    "eth0": "10.10.0.1/24",
}
HSN_OWNER = "hsn0 has 10.20.0.1"
DERIVED = ("=hsn0,hsn1", HSN_OWNER)

# What the site documents; what NCCL gets.
ON_HSN = {
    "no site": (None, DERIVED),
    "the site's": (centre(nccl="hsn"), ("hsn", SITE)),
    "gloo's is not here": (centre("ib0"), DERIVED),
    "one of gloo's is not here": (centre("hsn0,hsn2"), DERIVED),
    "gloo takes no prefix": (centre("hsn"), DERIVED),
    "NCCL's is not here": (centre(nccl="=ib0"), DERIVED),
    "one of NCCL's is here": (centre(nccl="hsn1,hsn2"), ("hsn1,hsn2", SITE)),
    "NCCL's, all but some": (centre(nccl="^docker,lo"), ("^docker,lo", SITE)),
}


@pytest.mark.parametrize(("site", "nccl"), ON_HSN.values(), ids=ON_HSN)
def test_interfaces_that_nccl_would_not_find(site, nccl):
    expected = {GLOO: ("hsn0", HSN_OWNER), NCCL: nccl}
    assert network(site, interfaces=HSN) == expected


def test_without_an_address_there_is_what_the_site_documents():
    site = centre("eth0", NCCL_IB_TIMEOUT="20")
    found = {GLOO: ("eth0", SITE), "NCCL_IB_TIMEOUT": ("20", SITE)}
    assert network(site, address=None) == found
    assert network(centre(), address=None) == {}


# --- a node's own profile ---------------------------------------------------------

FILE = "/etc/nccl.sh"
SITE_WITH = replace(
    centre("ib0", NCCL_NET="IB", NCCL_ALGO="Ring"),
    profile=FILE,
    profile_names=("NCCL_NET", "NCCL_PROTO", GLOO),
)


def with_profile(profile, environ=None, **options):
    return make_inputs(
        site=SITE_WITH,
        environ=environ or {},
        profile=profile,
        options=options,
        network=juelich(),
    )


def test_the_user_then_the_profile_then_the_site():
    line = f"{FILE}, line 3"
    profile = Profile(
        {"NCCL_NET": Setting("X", line), "NCCL_PROTO": Setting("Y", line)}
    )
    inputs = with_profile(profile, {"NCCL_PROTO": "Simple"})
    found = network_env.network(inputs, IB0)
    assert found["NCCL_NET"] == Setting("X", line)
    assert found["NCCL_ALGO"] == Setting("Ring", SITE)
    assert "NCCL_PROTO" not in found
    plan = make_plan(inputs)
    assert plan.environment["NCCL_NET"] == Setting("X", line)
    assert plan.messages.warnings == ()


def test_an_interface_of_the_profile_that_is_not_here():
    inputs = with_profile(Profile({GLOO: Setting("eth7", f"{FILE}, line 1")}))
    assert network_env.network(inputs, IB0)[GLOO] == Setting("ib0", SITE)
    message = network_env.warnings(inputs)[0]
    assert message.code == "HPC076"
    assert message.text.startswith(f"{FILE}, line 1 sets {GLOO}=eth7, which is not up")


def test_a_profile_that_cannot_be_read():
    unread = Profile(problem="Is a directory")
    assert network_env.warnings(with_profile(unread)) == [
        Message(
            "HPC247",
            f"{FILE} cannot be read: Is a directory. Site here takes variables of NCCL "
            "from it. Mount it on this node, or export them: NCCL_PROTO",
        )
    ]
    # No variable is missing.
    assert network_env.warnings(with_profile(unread, {"NCCL_PROTO": "LL"})) == []


# The user's variables, and the names that a launch reports.
SKIPPED = {
    "nothing": ({}, ("NCCL_PROTO",)),
    "the user has set it": ({"NCCL_PROTO": "LL"}, ()),
    "it is empty": ({"NCCL_PROTO": ""}, ("NCCL_PROTO",)),
}


@pytest.mark.parametrize(("environ", "reported"), SKIPPED.values(), ids=SKIPPED)
def test_only_what_is_missing_is_reported(environ, reported):
    """The site's own value replaces NCCL_NET's, and PATH is none of its names."""
    skipped = {"NCCL_NET": "line 1, x", "NCCL_PROTO": "line 2, x", "PATH": "line 3, x"}
    for names, options in ((reported, {}), (skipped, {"hpc_dry_run": "table"})):
        inputs = with_profile(Profile(skipped=skipped), environ, **options)
        found = network_env.advice(inputs)
        parts = ", ".join(f"{name} ({skipped[name]})" for name in names)
        text = f"{FILE}: not taken: {parts}. Export what you need, or remove the names "
        text += "from the site file"
        assert found == ((Message("HPC248", text),) if names else ())
        assert make_plan(inputs).messages.advice == found


# --- what is not here ---------------------------------------------------------------


def left_out(name, value, there_are="lo, hsn0, hsn1, eth0"):
    text = (
        f"site here sets {name}={value}, which is not up here. It is left out "
        f"(/etc/here.toml). There are: {there_are}"
    )
    return Message("HPC076", text)


NO_GLOO, NO_NCCL = left_out(GLOO, "ib0"), left_out(NCCL, "ib")
# The site's variables, the user's, and the messages about the missing ones.
NOT_HERE = {
    "here": (centre("hsn0", "hsn"), {}, []),
    "no interfaces": (centre(NCCL_IB_TIMEOUT="20"), {}, []),
    "gloo's": (centre("ib0"), {}, [NO_GLOO]),
    "one of gloo's": (centre("hsn0,ib0"), {}, [left_out(GLOO, "hsn0,ib0")]),
    "a prefix for gloo": (centre("hsn"), {}, [left_out(GLOO, "hsn")]),
    "both": (centre("ib0", "ib"), {}, [NO_GLOO, NO_NCCL]),
    "the user has set one": (centre("ib0", "ib"), {GLOO: "hsn1"}, [NO_NCCL]),
    "the user has set both": (centre("ib0", "ib"), {GLOO: "hsn1", NCCL: "hsn1"}, []),
}


@pytest.mark.parametrize(
    ("site", "environ", "expected"), NOT_HERE.values(), ids=NOT_HERE
)
def test_an_interface_of_the_site_that_is_not_here(site, environ, expected):
    inputs = make_inputs(site=site, environ=environ, network=juelich(interfaces=HSN))
    assert network_env.warnings(inputs) == expected
    assert list(make_plan(inputs).messages.warnings) == expected


def test_an_interface_of_the_site_that_is_down():
    here = juelich(interfaces=HSN, down=["hsn1"])
    inputs = make_inputs(site=centre("hsn1"), network=here)
    expected = left_out(GLOO, "hsn1", "lo, hsn0, eth0")
    assert network_env.warnings(inputs) == [expected]
    assert network_env.network(inputs, IB0)[GLOO] == Setting("hsn0", HSN_OWNER)


# --- in a plan ----------------------------------------------------------------------

FULL = centre("ib9", "ib0", NCCL_IB_TIMEOUT="20")


def test_several_nodes_get_the_variables_of_their_site():
    plan = make_plan(make_inputs(site=FULL))
    assert {k: v.value for k, v in plan.environment.items()} == {
        "OMP_NUM_THREADS": "1",
        FAULT_HANDLER: "1",
        GLOO: "eth0",
        NCCL: "ib0",
        "NCCL_IB_TIMEOUT": "20",
    }
    assert [message.code for message in plan.messages.warnings] == ["HPC076"]
    assert plan.meeting.interface == "eth0 (NCCL: ib0)"


@pytest.mark.parametrize(
    ("job", "options"),
    [
        (None, {}),
        (INTERACTIVE, {}),
        (outside_a_step(LaunchContext.BATCH_SCRIPT, ("jwb0001",)), {}),
        (step(nodes=("jwb0001",), allocated_nodes=3), {}),
        (step(), {"standalone": True}),
        (step(), {"nnodes": "1"}),
    ],
)
def test_one_node_and_nothing_of_the_site(job, options):
    plan = make_plan(make_inputs(job, options=options, site=FULL))
    assert plan.environment.keys() == {"OMP_NUM_THREADS", FAULT_HANDLER}
    assert (plan.messages.warnings, plan.meeting.site, plan.meeting.interface) == (
        (),
        None,
        "",
    )


def test_no_scheduler_and_nothing_of_the_site_but_the_interface():
    options = {"nnodes": "2", "rdzv_endpoint": "10.10.0.1:1"}
    plan = make_plan(make_inputs(None, options=options, site=FULL))
    assert plan.environment.keys() == {"OMP_NUM_THREADS", FAULT_HANDLER, GLOO}
    assert plan.environment[GLOO].value == "eth0"


# --- for a person -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("environ", "environment", "shown"),
    [
        ({}, {}, ""),
        ({}, {GLOO: "ib0"}, "ib0"),
        ({}, {GLOO: "ib0", NCCL: "ib0"}, "ib0"),
        ({}, {GLOO: "ib0", NCCL: "=ib0"}, "ib0"),
        ({}, {GLOO: "hsn0", NCCL: "=hsn0,hsn1"}, "hsn0 (NCCL: hsn0,hsn1)"),
        ({GLOO: "eth0"}, {}, "eth0"),
        ({GLOO: "eth0"}, {NCCL: "=ib0"}, "eth0 (NCCL: ib0)"),
        ({NCCL: "^lo"}, {GLOO: "ib0"}, "ib0 (NCCL: ^lo)"),
        ({NCCL: "ib"}, {}, ""),  # gloo looks for itself
        # the planned value replaces an empty one
        ({GLOO: ""}, {GLOO: "ib0"}, "ib0"),
    ],
)
def test_interfaces_for_a_person(environ, environment, shown):
    planned = {name: Setting(value, "") for name, value in environment.items()}
    assert network_env.interface_name(environ, planned) == shown


# --- the resolver ---------------------------------------------------------------------

LEVEL, SHORT = "TORCH_CPP_LOG_LEVEL", "RES_OPTIONS"


@pytest.mark.parametrize(
    ("resolver", "environ", "expected"),
    [
        (Resolver.UNKNOWN, {}, {}),
        (Resolver.ANSWERS, {}, {}),
        (Resolver.SILENT, {}, {LEVEL: "ERROR"}),
        (Resolver.DOWN, {}, {LEVEL: "ERROR", SHORT: "timeout:1 attempts:1"}),
        (Resolver.DOWN, {LEVEL: "INFO"}, {SHORT: "timeout:1 attempts:1"}),
        (Resolver.DOWN, {SHORT: "rotate"}, {LEVEL: "ERROR"}),
        (Resolver.SILENT, {LEVEL: "WARNING"}, {}),
    ],
)
def test_a_resolver_that_does_not_answer(resolver, environ, expected):
    inputs = make_inputs(environ=environ, node=replace(NODE, resolver=resolver))
    found = network_env.of_resolver(inputs)
    assert {name: setting.value for name, setting in found.items()} == expected
    assert all(setting.source for setting in found.values())
