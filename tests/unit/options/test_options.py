"""The user's options, read once."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.juelich import JSC, juelich, step
from tests.support.plans import explicit, make_inputs, make_plan
from torchrun_hpc.errors import LaunchError, Setting
from torchrun_hpc.options import rdzv_conf, values
from torchrun_hpc.options.command_line import OURS, TORCHRUN
from torchrun_hpc.options.options import Options, read


def of(_has_job=True, **asked):  # noqa: FBT002
    return read(explicit(asked), has_job=_has_job)


# --- what is set ----------------------------------------------------------------------


def test_nothing_is_set():
    assert of() == Options()
    assert of().problem is None
    assert "nnodes" not in of()
    assert of().nnodes == (1, 1)


def test_an_option_and_how_it_was_written():
    found = read({"nnodes": Setting("2:4", "PET_NNODES")})
    assert ("nnodes" in found, "rdzv_id" in found) == (True, False)
    assert str(found["nnodes"]) == "PET_NNODES=2:4"
    assert found.nnodes == (2, 4)
    with pytest.raises(KeyError):
        found["rdzv_id"]


def test_what_has_no_field_is_still_set():
    found = of(role="trainer", log_dir="/logs")
    assert found.given == explicit({"role": "trainer", "log_dir": "/logs"})


def test_of_several_problems_the_first_is_told():
    asked = {"master_port": -1, "nnodes": "two", "hpc_bind": "x", "rdzv_id": "mine"}
    found = of(**asked)
    assert found.problem.code == "HPC014"
    assert found.without(*found.wrong).given == explicit({"rdzv_id": "mine"})
    assert of(**dict(reversed(asked.items()))).problem.code == "HPC014"


# --- the site, and the user -----------------------------------------------------------

SITE = {"hpc_bind": "even", "hpc_preload": "torch, numpy"}


def test_a_site_sets_what_the_user_has_not():
    found = of(nnodes="2").with_site("here", SITE)
    assert (found.hpc_bind, found.hpc_preload) == ("even", ("torch", "numpy"))
    assert str(found["hpc_bind"]) == "site here: bind=even"
    assert str(found["hpc_preload"]) == "site here: preload=torch, numpy"
    assert "hpc_bind" not in found  # the user has not set it
    assert (found.nnodes, found.given) == ((2, 2), explicit({"nnodes": "2"}))


@pytest.mark.parametrize("asked", ["gpu", "none"])
def test_the_user_is_stronger_than_a_site(asked):
    found = of(hpc_bind=asked).with_site("here", SITE)
    assert (found.hpc_bind, str(found["hpc_bind"])) == (asked, f"--hpc_bind={asked}")
    assert found.of_site.keys() == {"hpc_preload"}
    assert found.hpc_preload == ("torch", "numpy")


def test_a_site_does_not_bind_what_torch_is_to_bind():
    found = of(numa_binding="node").with_site("here", SITE)
    assert (found.hpc_bind, found.problem) == ("none", None)
    assert found.of_site.keys() == {"hpc_preload"}


def test_a_site_without_defaults():
    assert of(nnodes="2").with_site("here", {}) == of(nnodes="2")


def test_a_problem_of_the_user_stays():
    found = of(nnodes="two").with_site("here", SITE)
    assert found.problem.code == "HPC014"


# --- how the nodes meet ---------------------------------------------------------------

FILE = "store_type=file"
BACKENDS = [
    # with a job, and without
    ({}, "c10d", "c10d"),
    ({"nnodes": "1"}, "c10d", "c10d"),
    ({"nnodes": "2"}, "c10d", "static"),
    ({"nnodes": "1:2"}, "c10d", "static"),
    ({"nnodes": "two"}, "c10d", "c10d"),
    *(
        (asked, "static", "static")
        for asked in ({"node_rank": 0}, {"master_addr": "n1"}, {"master_port": 1})
    ),
    *(
        ({"rdzv_backend": name, "nnodes": "2", "master_port": 1}, name, name)
        for name in ("c10d", "static", "etcd", "theirs")
    ),
    # torchrun ignores these values
    ({"standalone": True, "rdzv_backend": "static"}, "c10d", "c10d"),
    ({"standalone": True, "node_rank": 1, "nnodes": "2"}, "c10d", "c10d"),
    ({"rdzv_conf": FILE}, "c10d", "c10d"),
]


@pytest.mark.parametrize(("asked", "in_job", "alone"), BACKENDS)
def test_backend(asked, in_job, alone):
    for has_job, expected in ((True, in_job), (False, alone)):
        found = read(explicit(asked), has_job=has_job)
        assert found.backend == expected
        assert found.is_static is (expected == "static")
        by_tcp = expected == "c10d" and "rdzv_conf" not in asked
        assert found.is_c10d is by_tcp


ENDPOINTS = [
    ({}, None, None),
    ({"rdzv_endpoint": "n1:7"}, ("n1", 7), "--rdzv_endpoint=n1:7"),
    ({"master_addr": "n1"}, ("n1", None), "--master_addr=n1"),
    (
        {"master_addr": "n1", "rdzv_endpoint": "n2:7"},
        ("n2", 7),
        "--rdzv_endpoint=n2:7",
    ),
    (
        {"rdzv_backend": "c10d", "master_addr": "n1", "master_port": 7},
        ("n1", None),
        "--master_addr=n1",
    ),
    ({"rdzv_backend": "static", "rdzv_endpoint": "n1"}, ("n1", None), None),
    # another backend, or nobody, reads these values
    ({"rdzv_backend": "etcd", "rdzv_endpoint": "http://n1"}, None, None),
    ({"rdzv_conf": FILE, "rdzv_endpoint": "/a/file"}, None, None),
    ({"standalone": True, "rdzv_endpoint": "/a/file"}, None, None),
    ({"master_port": 7}, None, None),
]


@pytest.mark.parametrize(("asked", "expected", "written"), ENDPOINTS)
def test_endpoint(asked, expected, written):
    found = of(**asked)
    assert (found.endpoint, found.problem) == (expected, None)
    if expected is None:
        assert found.endpoint_setting is None
    elif written is not None:
        assert str(found.endpoint_setting) == written


def test_the_static_rendezvous_has_no_store_in_a_file():
    found = of(rdzv_backend="static", rdzv_conf=FILE, rdzv_endpoint="/a/file")
    assert found.problem.code == "HPC014"
    assert not found.rdzv_conf.uses_file


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({}, False),
        *(({"nnodes": text}, True) for text in ("1", "1:1", "01")),
        *(({"nnodes": text}, False) for text in ("2", "1:2", "two")),
        ({"standalone": True}, True),
        ({"standalone": True, "nnodes": "2"}, True),
        ({"standalone": False}, False),
    ],
)
def test_one_node_that_is_asked_for(asked, expected):
    assert of(**asked).asks_for_one_node is expected


# --- without some of them -------------------------------------------------------------


def test_without():
    asked = {"nnodes": "2", "local_addr": "n1", "rdzv_endpoint": "n1:7", "role": "a"}
    found = of(**asked)
    assert found.without() == found
    assert found.without("rdzv_id") == found  # it was not set
    less = found.without("local_addr", "rdzv_endpoint", "role")
    assert less.given == explicit({"nnodes": "2"})
    assert (less.local_addr, less.rdzv_endpoint, less.endpoint) == ("", "", None)
    assert less.nnodes == (2, 2)
    assert found.without("nnodes").nnodes == (1, 1)
    assert found.without("nnodes").endpoint == ("n1", 7)


def test_without_what_made_it_static():
    found = of(master_addr="n1", rdzv_conf="is_host=0", hpc_spares="1")
    assert found.is_static
    less = found.without("master_addr")
    assert (less.is_c10d, less.endpoint, less.hpc_spares) == (True, None, 1)
    assert less.rdzv_conf.is_host is False
    assert less.without("rdzv_conf").rdzv_conf.is_host is None


@pytest.mark.parametrize("name", ["rdzv_endpoint", "master_addr"])
def test_without_a_wrong_endpoint(name):
    found = of(**{name: "a b", "master_port": 7}).without(name, "master_port")
    assert (found.endpoint, found.master_port, found.problem) == (None, None, None)


# --- anything, and how often ----------------------------------------------------------

text = st.text(st.characters(), max_size=9)  # an environment may have any bytes
usual = st.sampled_from(
    [
        *("1", "2", "2:3", "n1", "n1:7", "[::1]:7", "static", "c10d", "etcd", "auto"),
        *("is_host=1", "join_timeout=5", FILE, "SIGTERM,SIGKILL", "none", "torch,a.b"),
        *("9" * 5000, "is_host=2", "join_timeout=0", "a=b,c", "timeout=0", "٣", "gpu"),
    ]
)
KINDS = {
    bool: st.just(value=True),
    int: st.integers(-2, 70000) | st.integers(),
    float: st.floats(),
    str: usual | text,
}
anything = st.fixed_dictionaries(
    {},
    optional={name: KINDS[kind] for name, kind in TORCHRUN.items()}
    | {name: KINDS[bool if name == "hpc_debug" else str] for name in OURS},
)


@settings(max_examples=500, deadline=None)
@given(anything, st.booleans())
def test_any_options_are_read_or_refused(asked, has_job):
    options = read(explicit(asked), has_job=has_job)
    assert options.problem is None or isinstance(options.problem, LaunchError)
    assert options.given.items() <= explicit(asked).items()
    wrong = asked.keys() - options.given.keys()
    assert not wrong or options.problem is not None
    for name in wrong - {"rdzv_endpoint", "master_addr", "rdzv_conf"}:
        assert getattr(options, name) == getattr(Options(), name)


def counted(kind, made):
    """Return a kind that counts how often it is made."""

    def new(cls, *args, **kwargs):
        made.append(kind.__name__)
        is_tuple = issubclass(kind, tuple)
        return kind.__new__(cls, *args, **kwargs) if is_tuple else object.__new__(cls)

    return type("Counted", (kind,), {"__new__": new})


def test_each_option_is_read_once_for_a_plan(monkeypatch):
    made: list[str] = []
    for module, name in (
        (values, "NodeRange"),
        (values, "HostPort"),
        (rdzv_conf, "RdzvConf"),
    ):
        monkeypatch.setattr(module, name, counted(getattr(module, name), made))
    nodes = tuple(f"jwb000{number}" for number in range(1, 5))
    hosts = {"jwb0004": "10.10.0.4", "jwb0004i": "10.20.0.4"}
    asked = {
        "nnodes": "4",
        "rdzv_endpoint": "jwb0001:29400",
        "rdzv_conf": "join_timeout=5",
    }
    plan = make_plan(
        make_inputs(
            step(3, nodes=nodes),
            site=JSC,
            network=juelich(3, hosts=hosts),
            options=asked,
        )
    )
    assert plan.meeting.endpoint == "jwb0001i:29400"
    assert "join_timeout=5" in plan.options["rdzv_conf"].value
    assert sorted(made) == ["HostPort", "NodeRange", "RdzvConf"]
