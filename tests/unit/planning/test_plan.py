"""Decisions that all plans share."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.detection import detected
from tests.support.juelich import (
    BATCH,
    INTERACTIVE,
    JSC,
    ONE_NODE_JOBS,
    ONE_NODE_STEP,
    SHELL,
    STEP,
    juelich,
    step,
)
from tests.support.plans import (
    BLOCK,
    NODE,
    ONE_WORKER,
    conf_of,
    planned,
    planned_at,
    refused,
    values,
)
from tests.support.recordings import BY_SLURM, recorded
from torchrun_hpc.errors import LaunchError, Message, Setting
from torchrun_hpc.schedulers.job import Task
from torchrun_hpc.schedulers.process import Process
from torchrun_hpc.variables import FAULT_HANDLER

# --- variables of torch's release -----------------------------------------------------

UNSHARED = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": Setting("1", "torch 2.5.1")}
OLD_TORCH = replace(NODE, of_release=UNSHARED)


@pytest.mark.parametrize(
    ("job", "options", "is_c10d"),
    [
        (STEP, {}, False),  # ours
        (STEP, {"hpc_rendezvous": "c10d"}, True),
        (STEP, {"nnodes": "2:3"}, True),
        (STEP, {"rdzv_backend": "static"}, False),
        (STEP, {"standalone": True}, True),
        (STEP, {"standalone": True, "rdzv_backend": "static"}, True),
        (STEP, {"rdzv_backend": "etcd", "rdzv_endpoint": "e:1"}, False),
        (None, {}, True),
        (None, {"master_port": 1}, False),
        (None, {"nnodes": "2", "rdzv_endpoint": "::1"}, False),
    ],
)
def test_what_torchs_release_needs_with_c10d_is_planned(job, options, is_c10d):
    plan = planned(job, options=options, node=OLD_TORCH)
    found = {k: v for k, v in plan.environment.items() if k in UNSHARED}
    assert found == (UNSHARED if is_c10d else {})


@pytest.mark.parametrize(("value", "is_planned"), [("0", False), ("", True)])
def test_what_torchs_release_needs_may_be_set_otherwise(value, is_planned):
    environ = dict.fromkeys(UNSHARED, value)
    plan = planned(None, environ=environ, node=OLD_TORCH)
    assert (UNSHARED.items() <= plan.environment.items()) is is_planned


# --- rdzv_conf ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("conf", "expected"),
    [
        ("is_host=0", "is_host=0,read_timeout=600,join_timeout=900"),
        ("is_host=True", "is_host=True,read_timeout=600,join_timeout=900"),
        ("join_timeout=5", "join_timeout=5,is_host=1,read_timeout=600"),
        (
            "read_timeout=7, last_call_timeout = 1,",
            "read_timeout=7,last_call_timeout=1,is_host=1,join_timeout=900",
        ),
        (
            "store_type=tcp",
            "store_type=tcp,is_host=1,read_timeout=600,join_timeout=900",
        ),
        ("foo=a=b", "foo=a=b,is_host=1,read_timeout=600,join_timeout=900"),
        ("", "is_host=1,read_timeout=600,join_timeout=900"),
    ],
)
def test_an_explicit_conf_is_kept(conf, expected):
    plan = planned(options={"rdzv_conf": conf})
    assert plan.options["rdzv_conf"].value == expected


@pytest.mark.parametrize(
    ("rank", "is_host", "is_coordinator", "listens"),
    [
        (0, "1", True, True),
        (0, "false", False, False),
        (1, "yes", True, False),
        (1, "0", False, False),
    ],
)
def test_an_explicit_host_wins(rank, is_host, is_coordinator, listens):
    plan = planned(step(rank), options={"rdzv_conf": f"is_host={is_host}"})
    assert conf_of(plan)["is_host"] == is_host
    assert plan.meeting.is_coordinator is is_coordinator
    assert (plan.meeting.listen is not None) is listens


# The options that choose a backend.
BACKENDS = {
    "scheduler": {},
    "c10d": {"hpc_rendezvous": "c10d"},
    "static": {"rdzv_backend": "static"},
    "etcd": {"rdzv_backend": "etcd", "rdzv_endpoint": "keeper:2379"},
    "etcd-v2": {"rdzv_backend": "etcd-v2", "rdzv_endpoint": "keeper:2379"},
    "somebody's": {"rdzv_backend": "theirs", "rdzv_endpoint": "keeper:1"},
}


@pytest.mark.parametrize(
    ("backend", "conf"),
    [
        ("scheduler", "is_host=maybe"),
        ("c10d", "is_host=maybe"),
        ("static", "timeout=0"),
    ],
)
def test_what_a_backend_reads_is_checked(backend, conf):
    options = BACKENDS[backend] | {"rdzv_conf": conf}
    assert refused(
        "HPC019", f"--rdzv_conf={conf}: ", planned, options=options
    ).everywhere


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_a_backend_does_not_read_may_be_anything(backend):
    for conf in "rank=first", "timeout= 5 ", "join_timeout=+1_0,read_timeout=٣":
        options = BACKENDS[backend] | {"rdzv_conf": conf}
        plan = planned(options=options)
        written = plan.options.get("rdzv_conf")
        assert written is None or "".join(conf.split()) in written.value, conf


@pytest.mark.parametrize(
    ("job", "options", "read"),
    [
        (None, {}, "is_host=maybe"),
        (None, {"standalone": True, "rdzv_backend": "static"}, "is_host=maybe"),
        (None, {"standalone": True, "node_rank": 1}, "is_host=maybe"),
        (None, {"nnodes": "2", "rdzv_endpoint": "10.10.0.1:1"}, "timeout=0"),
        (None, {"nnodes": "1", "master_port": 1}, "timeout=0"),
        ("step", {"standalone": True, "rdzv_backend": "static"}, "is_host=maybe"),
        ("step", {}, "is_host=maybe"),
        ("step", {"master_port": 1}, "timeout=0"),
    ],
)
def test_the_backend_in_force_reads_them(job, options, read):
    """torchrun's default differs, and --standalone is stronger than an explicit one."""
    job = ONE_NODE_STEP if job else None
    unread = {"is_host=maybe": "timeout=0", "timeout=0": "is_host=maybe"}[read]
    refused("HPC019", read, planned, job, options=options | {"rdzv_conf": read})
    planned(job, options=options | {"rdzv_conf": unread})


@pytest.mark.parametrize("rank", range(2))
def test_static_does_not_read_who_hosts(rank):
    options = {"rdzv_backend": "static", "rdzv_conf": f"is_host={rank}"}
    plan = planned(step(rank), options=options)
    assert plan.meeting.is_coordinator is (rank == 0)
    assert (plan.meeting.listen is not None) is (rank == 0)


# --- variables ----------------------------------------------------------------------

ETHERNET = {"lo": "127.0.0.1/8", "eth0": "10.20.0.1/24"}
RAILS = {
    "lo": "127.0.0.1/8",
    "hsn0": "10.20.0.1/16",
    "hsn1": "10.20.1.1/16",
    "hsn2": "10.20.2.1/16",
    "hsn3": "10.20.3.1/16",
}


@pytest.mark.parametrize(
    ("interfaces", "down", "gloo", "nccl"),
    [
        (ETHERNET, [], "eth0", "=eth0"),
        (RAILS, [], "hsn0", "=hsn0,hsn1,hsn2,hsn3"),
        (RAILS, ["hsn1"], "hsn0", "=hsn0,hsn2,hsn3"),
        (ETHERNET | {"ib0": "10.30.0.1/24"}, [], "eth0", None),
        (ETHERNET | {"ib0": ""}, [], "eth0", None),
        (ETHERNET | {"ib0": "10.30.0.1/24"}, ["ib0"], "eth0", "=eth0"),
        ({"ib0": "10.20.0.1/24"}, [], "ib0", None),
        ({"bond0.2093": "10.20.0.1/24", "bond0": ""}, [], "bond0.2093", "=bond0.2093"),
        ({"eth0": "10.1.0.1/24", "eth0:1": "10.20.0.1/24"}, [], "eth0:1", "=eth0:1"),
        # exact for gloo, and never all of a prefix for NCCL
        (ETHERNET | {"eth1": "10.7.0.1/24"}, [], "eth0", "=eth0"),
    ],
)
def test_interfaces(interfaces, down, gloo, nccl):
    network = juelich(interfaces=interfaces, down=down)
    found = values(planned(network=network).environment)
    assert found["GLOO_SOCKET_IFNAME"] == gloo
    assert found.get("NCCL_SOCKET_IFNAME") == nccl


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"GLOO_SOCKET_IFNAME": "eth0"}, {"NCCL_SOCKET_IFNAME": "=eth0"}),
        ({"GLOO_SOCKET_IFNAME": "lo,eth0"}, {"NCCL_SOCKET_IFNAME": "=eth0"}),
        ({"NCCL_SOCKET_IFNAME": "eth"}, {"GLOO_SOCKET_IFNAME": "eth0"}),
        ({"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}, {}),
        (
            {"GLOO_SOCKET_IFNAME": "", "NCCL_SOCKET_IFNAME": ""},
            {"GLOO_SOCKET_IFNAME": "eth0", "NCCL_SOCKET_IFNAME": "=eth0"},
        ),
        # gloo ignores what has one character, and it is the user's all the same
        ({"GLOO_SOCKET_IFNAME": "x"}, {"NCCL_SOCKET_IFNAME": "=eth0"}),
    ],
)
def test_the_users_interfaces_stay(environ, expected):
    plan = planned(
        network=juelich(interfaces=ETHERNET),
        environ=environ,
        node=ONE_WORKER,
    )
    assert values(plan.environment) == expected | {FAULT_HANDLER: "1"}
    assert plan.messages.warnings == ()


# Not lo, on which no other node is.
THERE_ARE = "There are: eth0, ib0"
BAD_GLOO = {
    "^lo": ("'^lo'", THERE_ARE),
    "=ib0": ("'=ib0'", f"Did you mean ib0? {THERE_ARE}"),
    "ib": ("'ib'", f"Did you mean ib0? {THERE_ARE}"),
    "eth": ("'eth'", f"Did you mean eth0? {THERE_ARE}"),
    "mlx5_0": ("'mlx5_0'", THERE_ARE),
    "ib0, eth0": ("' eth0'", f"Did you mean eth0? {THERE_ARE}"),
    " ib0": ("' ib0'", f"Did you mean ib0? {THERE_ARE}"),
    "ib0,ib1": ("'ib1'", f"Did you mean ib0? {THERE_ARE}"),
    "IB0": ("'IB0'", f"Did you mean ib0? {THERE_ARE}"),
    "10.20.0.1": ("'10.20.0.1'", THERE_ARE),
    # gloo refuses an empty name, unless it is the last
    ",ib0": ("''", THERE_ARE),
    "eth0,,ib0": ("''", THERE_ARE),
}


@pytest.mark.parametrize("value", BAD_GLOO)
def test_gloo_interface_that_gloo_would_crash_on(value):
    part, hint = BAD_GLOO[value]
    for job in step(), None, ONE_NODE_STEP:
        error = refused(
            "HPC054",
            f"GLOO_SOCKET_IFNAME={value}: this node has no interface {part}",
            planned,
            job,
            environ={"GLOO_SOCKET_IFNAME": value},
        )
        assert str(error).endswith(f"of this node. {hint}"), job
        assert error.everywhere is value.startswith(("^", "=")), job
    environ = {"GLOO_SOCKET_IFNAME": value}
    refused("HPC054", f"no interface {part}", planned_at, BLOCK, 0, environ=environ)


@pytest.mark.parametrize("value", ["ib0", "eth0,ib0", "ib0,", "x", "^", "=", ""])
def test_gloo_interface_that_gloo_takes(value):
    plan = planned(environ={"GLOO_SOCKET_IFNAME": value})
    assert ("GLOO_SOCKET_IFNAME" in plan.environment) is (value == "")


@pytest.mark.parametrize(
    ("value", "warns"),
    [
        ("ib0", False),
        ("ib", False),
        ("mlx,ib", False),
        ("=ib0", False),
        ("=ib0,mlx5_0", False),
        ("^docker,lo", False),
        ("", False),
        ("x", False),  # NCCL ignores one character
        ("=ib", True),
        ("mlx", True),
        ("hsn0,hsn1", True),
        ("dn", True),  # dn0 is down
        ("=", False),
        ("=,", True),
    ],
)
def test_nccl_interface_that_matches_nothing(value, warns):
    interfaces = {"lo": "127.0.0.1/8", "ib0": "10.20.0.1/24", "dn0": "10.9.0.1/24"}
    plan = planned(
        network=juelich(interfaces=interfaces, down=["dn0"]),
        environ={"NCCL_SOCKET_IFNAME": value},
    )
    assert bool(plan.messages.warnings) is warns
    for warning in plan.messages.warnings:
        start = f"HPC058 NCCL_SOCKET_IFNAME={value} matches no interface that is up"
        assert str(warning).startswith(start)
        guess = "Did you mean ib0? " if value == "=ib" else ""
        assert f". {guess}There are: lo, ib0. Names are prefixes" in warning.text


@pytest.mark.parametrize(
    ("value", "noted"),
    [("eth0", True), ("ib0", False), ("eth0,ib0", False), ("", False)],
)
def test_gloo_interface_that_is_not_the_jobs(value, noted):
    interfaces = {"lo": "127.0.0.1/8", "eth0": "10.10.0.1/24", "ib0": "10.20.0.1/24"}
    plan = planned(
        network=juelich(interfaces=interfaces), environ={"GLOO_SOCKET_IFNAME": value}
    )
    text = f"GLOO_SOCKET_IFNAME={value} is set, but the job's address 10.20.0.1 is on"
    found = [str(note) for note in plan.messages.notes]
    assert len(found) == noted
    assert all(note.startswith(f"HPC224 {text} ib0. ") for note in found)


CRASH = Setting("1", "for the report of a crash")


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, CRASH),
        ({FAULT_HANDLER: ""}, None),  # as Python reads it: off
        ({FAULT_HANDLER: "0"}, None),
        ({FAULT_HANDLER: "1"}, None),
    ],
)
def test_crashes_are_described_unless_the_user_decides(environ, expected):
    for job in step(), None, INTERACTIVE, ONE_NODE_STEP:
        plan = planned(job, environ=environ)
        assert plan.environment.get(FAULT_HANDLER) == expected, job


def test_a_task_that_is_a_worker_is_as_the_user_starts_it():
    assert FAULT_HANDLER not in planned_at(BLOCK, 1).environment


# --- a stall --------------------------------------------------------------------------

EVERY_JOB = [step(), None, INTERACTIVE, *ONE_NODE_JOBS.values()]


@pytest.mark.parametrize(
    ("value", "seconds"),
    [("1", 1), ("600", 600), ("9999999", 9999999), ("none", 0), (None, None)],
)
def test_after_how_many_seconds_a_stall_is_reported(value, seconds):
    options = {} if value is None else {"hpc_stall_report": value}
    for job in EVERY_JOB:
        plan = planned(job, options=options)
        assert plan.asked.hpc_stall_report == seconds, job
        assert not [note for note in plan.messages.notes if note.code == "HPC077"], job


# --- what is left out inside torch ----------------------------------------------------

WITHOUT = "hpc_without_patches"


@pytest.mark.parametrize(
    ("value", "names"),
    [("agent", ("agent",)), (" agent, host_name ,", ("agent", "host_name")), ("", ())],
)
def test_which_patches_are_left_out(value, names):
    for job in EVERY_JOB:
        plan = planned(job, options={WITHOUT: value})
        assert plan.asked.hpc_without_patches == names, job
        notes = [str(note) for note in plan.messages.notes if note.code == "HPC089"]
        text = f"HPC089 --{WITHOUT}={value} switches these patches off"
        assert notes == ([text] if names else []), job


def left_out(name):
    """Return the inputs in which the user leaves out a patch."""
    return {WITHOUT: name}, NODE


def unfit(name):
    """Return the inputs in which a patch does not fit the installed torch."""
    return {}, replace(NODE, incompatible_patches=(name,))


LACKING = [left_out, unfit]


@pytest.mark.parametrize("lacking", LACKING)
@pytest.mark.parametrize(
    ("name", "backend"),
    [("agent", "c10d"), ("watch_workers", "scheduler"), ("host_name", "scheduler")],
)
def test_pytorchs_own_agents_meet_in_its_own_rendezvous(name, backend, lacking):
    options, node = lacking(name)
    for rank in 0, 1:
        plan = planned(step(rank), options=options, node=node)
        assert plan.meeting.backend == backend, rank


@pytest.mark.parametrize(
    ("lacking", "reason"),
    [(left_out, f"not work with --{WITHOUT}=agent."), (unfit, "whose agent has")],
)
def test_pytorchs_own_agents_do_not_meet_by_numbers(lacking, reason):
    others, node = lacking("agent")
    options = others | {"hpc_rendezvous": "scheduler"}
    text = "--hpc_rendezvous=scheduler needs"
    error = refused("HPC126", text, planned, options=options, node=node)
    assert reason in str(error)


@pytest.mark.parametrize("lacking", LACKING)
@pytest.mark.parametrize("name", ["agent", "watch_workers"])
def test_spares_need_agents_that_act_together(name, lacking):
    others, node = lacking(name)
    text = "--hpc_spares=1 needs several nodes"
    refused("HPC201", text, planned, options=others | {"hpc_spares": "1"}, node=node)


@pytest.mark.parametrize("lacking", LACKING)
def test_no_stall_report_without_a_watch_on_the_workers(lacking):
    others, node = lacking("watch_workers")
    options = others | {"hpc_stall_report": "600"}
    notes = planned(options=options, node=node).messages.notes
    text = "--hpc_stall_report=600 has no effect on workers that are not watched"
    assert Message("HPC077", text) in notes


# --- properties ---------------------------------------------------------------------

names = st.sampled_from(
    [
        ("n1", "n2", "n3"),
        ("n9", "n10", "n11"),
        ("jwb0003", "jwb0001"),
        ("jwb0001.juwels", "jwb0002.juwels"),
    ]
)
optional = {
    "nnodes": st.sampled_from(["2:3", "1:9"]),
    "rdzv_id": st.just("mine"),
    "rdzv_backend": st.just("c10d"),
    "rdzv_conf": st.sampled_from(["join_timeout=5", "read_timeout=1,close_timeout=1"]),
}


@settings(deadline=None)
@given(names, st.sampled_from([None, JSC]), st.data())
def test_nodes_agree(nodes, site, data):
    rename = site.rewrite if site else str
    hosts = {name: f"10.10.0.{n}" for n, name in enumerate(nodes, 1)}
    hosts |= {rename(name): f"10.20.0.{n}" for n, name in enumerate(nodes, 1)}
    hosts["vip"] = "10.20.0.99"
    options = data.draw(st.fixed_dictionaries({}, optional=optional))
    endpoint = data.draw(
        st.none() | st.sampled_from([*hosts, *hosts.values(), "10.10.0.1:1"])
    )
    if endpoint is not None:
        options["rdzv_endpoint"] = endpoint
        options["rdzv_backend"] = "c10d"
    launch_id = data.draw(
        st.from_regex("[0-9]{1,9}(_[0-9])?[.][0-9](-r1)?", fullmatch=True)
    )

    plan = [
        planned(
            replace(step(rank, nodes=nodes), launch_id=launch_id),
            site=site,
            options=options,
            network=juelich(rank, hosts=hosts),
        )
        for rank in range(len(nodes))
    ]
    for name in ("nnodes", "rdzv_id", "rdzv_backend", "rdzv_endpoint", "node_rank"):
        found = [m.options.get(name) for m in plan]
        assert len({option and option.value for option in found}) == 1, name
    assert len({m.meeting.endpoint for m in plan}) == 1
    assert len({m.messages.notes for m in plan}) == 1
    assert len({m.meeting.nodes for m in plan}) == 1
    assert [m.meeting.node_rank for m in plan] == list(range(len(nodes)))
    assert sum(conf_of(m)["is_host"] == "1" for m in plan) == 1
    assert len({m.meeting.local_address for m in plan}) == len(nodes)
    for m in plan:
        host, _, port = m.options["rdzv_endpoint"].value.rpartition(":")
        assert m.meeting.listen in (None, (host, int(port)))
        assert m.meeting.listen is None or conf_of(m)["is_host"] == "1"


text = st.text(st.characters(exclude_characters="\0", codec="utf-8"), max_size=10)


def mostly(*usual):
    """Draw a usual text, and any text now and then."""
    return st.integers(0, 4).flatmap(lambda n: st.sampled_from(usual) if n else text)


anything = {
    "nnodes": mostly("1", "2", "3", "1:2", "2:3", "1:9"),
    "standalone": st.booleans(),
    "node_rank": st.integers(-1, 3),
    "master_addr": mostly("jwb0001", "jwb0002i", "10.20.0.1", "fd::1"),
    "master_port": st.integers(1, 65535),
    "rdzv_id": mostly("mine"),
    "rdzv_backend": mostly("c10d", "static", "etcd"),
    "rdzv_endpoint": mostly("jwb0001:1", "[::1]:2", "10.10.0.2", "vip:0", "10.9.9.9:1"),
    "rdzv_conf": mostly("is_host=1", "store_type=file", "join_timeout=1,a=b", "a,b"),
    "local_addr": mostly("jwb0001i", "10.10.0.1", "127.0.0.1"),
}
variables = {
    "GLOO_SOCKET_IFNAME": mostly("ib0", "lo,", "lo"),
    "NCCL_SOCKET_IFNAME": mostly("ib", "=ib0", "^lo", "mlx"),
    "OMP_NUM_THREADS": text,
}
every_job = st.sampled_from(
    [
        None,
        BATCH,
        SHELL,
        *ONE_NODE_JOBS.values(),
        step(0),
        step(2),
        step(1, task=Task(1, 4, 0, 2)),
    ]
)


@settings(max_examples=500, deadline=None)
@given(
    every_job,
    st.fixed_dictionaries({}, optional=anything),
    st.fixed_dictionaries({}, optional=variables),
)
def test_any_options_are_planned_or_refused(job, options, environ):
    rank = (job and job.node_rank) or 0
    with suppress(LaunchError):
        plan = planned(job, options=options, environ=environ, network=juelich(rank))
        assert plan.meeting.nodes in ({1, 3} if job else range(1, 10))


REFUSED_LAUNCHES = {
    "slurm-salloc-shell": "HPC060",
    "slurm-sbatch-script": "HPC061",
    "slurm-srun-2-nodes-4-tasks-each": "HPC062",
    "slurm-srun-uneven-tasks": "HPC062",
}


@pytest.mark.parametrize(("name", "code"), REFUSED_LAUNCHES.items())
def test_recorded_launch_is_refused(name, code):
    for environ, hostname in recorded(name):
        job = detected(Process(environ, hostname))
        with pytest.raises(LaunchError, match="\n    srun --nodes=") as caught:
            planned(job, network=juelich(job.node_rank or 0))
        assert (caught.value.code, caught.value.everywhere) == (code, True)


@pytest.mark.parametrize("name", sorted(set(BY_SLURM) - set(REFUSED_LAUNCHES)))
def test_recorded_launch_is_planned(name):
    for rank, (environ, hostname) in enumerate(recorded(name)):
        job = detected(Process(environ, hostname))
        plan = planned(job, network=juelich(int(hostname[-1]) - 1))
        assert (plan.meeting.nodes, plan.meeting.node_rank) == (len(job.nodes), rank)
        assert (plan.meeting.listen is not None) is (rank == 0)
        assert plan.messages.warnings == ()
