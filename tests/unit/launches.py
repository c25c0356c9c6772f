"""Launches as each launcher's variables describe them, and what is refused there.

Of Flux, PALS and jsrun nothing was recorded. Their variables are those of
flux-environment(7); of ALCF's and NCAR's documentation of mpiexec, and Slurm's plugin
cray_shasta, which sets the same; and of users' scripts for systems with jsrun.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from nodes import changed, detected, tasks_at

from torchrun_hpc.errors import LaunchError
from torchrun_hpc.schedulers.pmi import Exchanged
from torchrun_hpc.schedulers.process import Process

HOSTS = ("jwb0001", "jwb0002", "jwb0003", "jwb0004")


def open_mpi_5(task, node, _places):
    return {
        "OMPI_COMM_WORLD_RANK": task.rank,
        "OMPI_COMM_WORLD_SIZE": task.size,
        "OMPI_COMM_WORLD_LOCAL_RANK": task.local_rank,
        "OMPI_COMM_WORLD_LOCAL_SIZE": task.local_size,
        "PMIX_NAMESPACE": "prterun-jwb0001-8511@1",
        "PMIX_SERVER_URI2": f"prterun-jwb0001-8511@0.{node};tcp4://127.0.0.1:51163",
    }


def open_mpi_4(task, node, places):
    return {
        **open_mpi_5(task, node, places),
        "PMIX_NAMESPACE": "959053825",
        "PMIX_SERVER_URI2": f"959053824.{node};tcp4://127.0.0.1:49047",
        "OMPI_MCA_orte_hnp_uri": "959053824.0;tcp://10.10.0.1:43695",
        "OMPI_MCA_orte_num_nodes": max(places) + 1,
    }


def hydra(task, _node, _places):
    return {
        "PMI_RANK": task.rank,
        "PMI_SIZE": task.size,
        "MPI_LOCALRANKID": task.local_rank,
        "MPI_LOCALNRANKS": task.local_size,
    }


def pals(task, node, _places):
    return {
        "PALS_RANKID": task.rank,
        "PALS_NODEID": node,
        "PALS_LOCAL_RANKID": task.local_rank,
        "PALS_LOCAL_SIZE": task.local_size,
        "PALS_APID": "5b0de0e3-7c5f-4b4c-9dc2-1f0b2a1c7d11",
        "PMI_RANK": task.rank,
        "PMI_SIZE": task.size,
        "PMI_LOCAL_RANK": task.local_rank,
        "PMI_LOCAL_SIZE": task.local_size,
    }


def flux(task, _node, places):
    return {
        "FLUX_JOB_ID": "\u0192D2e73NP",
        "FLUX_JOB_SIZE": task.size,
        "FLUX_JOB_NNODES": max(places) + 1,
        "FLUX_TASK_RANK": task.rank,
        "FLUX_TASK_LOCAL_ID": task.local_rank,
        "PMI_RANK": task.rank,
        "PMI_SIZE": task.size,
    }


def jsrun(task, _node, _places):
    return {
        "JSM_NAMESPACE_RANK": task.rank,
        "JSM_NAMESPACE_SIZE": task.size,
        "JSM_NAMESPACE_LOCAL_RANK": task.local_rank,
        "JSM_NAMESPACE_LOCAL_SIZE": task.local_size,
        "PMIX_NAMESPACE": "csm-42-1",
    }


# The variables, and whether the process manager answers.
KINDS = {
    "Open MPI 4": (open_mpi_4, False),
    "Open MPI 5": (open_mpi_5, False),
    "Hydra": (hydra, True),
    "Hydra alone": (hydra, False),
    "PALS": (pals, False),
    "Flux": (flux, True),
    "Flux alone": (flux, False),
    "jsrun": (jsrun, False),
}

FILE = "/var/spool/pbs/aux/17[3].server"
PBS = {"PBS_JOBID": "17[3].server", "PBS_NODEFILE": FILE}


def launch(kind, places, job=None, files=None):
    """Return the processes of a launch.

    Args:
        kind: One of `KINDS`.
        places: For each rank its node.
        job: Variables of the job around it.
        files: What can be read.
    """
    variables, answers = KINDS[kind]
    exchanged = Exchanged(HOSTS[0], "0badcafe", tuple(places)) if answers else None
    around = job or {}
    return [
        Process(
            around | {k: f"{v}" for k, v in variables(task, node, places).items()},
            HOSTS[node],
            read=(files or {}).get,
            exchange=lambda _: exchanged,
        )
        for node, task in zip(places, tasks_at(places), strict=True)
    ]


def with_changes(process, changes):
    """Return a process with changed variables; a value of None removes one."""
    return replace(process, environ=changed(process.environ, changes))


# Codes of faults that all nodes share.
EVERYWHERE = {f"HPC{code:03}" for code in (*range(20, 27), 30, 36, 140)}


def assert_refused(process, wrong):
    """Check how a process is refused if one of its variables has another value.

    Args:
        process: A process that is understood unchanged.
        wrong: By the beginning of a message, with its code, variables and the values
            that lead to it; of None, it is not set. In the message ``{name}`` stands
            for the variable, ``{value}`` for its value, and ``{shown}`` for both.
    """
    assert detected(process)
    for message, faults in wrong.items():
        for name, values in faults.items():
            for value in values:
                shown = f"{name}={value!r}"
                start = message.format(name=name, value=value, shown=shown)
                assert_refusal(with_changes(process, {name: value}), start)


def assert_refusal(process, start):
    """Check the beginning of a message, with its code, and who reports it."""
    with pytest.raises(LaunchError) as caught:
        pytest.fail(f"{start}: not {detected(process)}")
    text = f"{caught.value.code} {caught.value}"
    assert text.startswith(start)
    assert text.isprintable()
    assert caught.value.everywhere is (caught.value.code in EVERYWHERE)
