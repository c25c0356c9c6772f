"""What is said of torch's collectives, where tasks tell of several failures."""

from __future__ import annotations

import pytest

from torchrun_hpc.doctor import conductor

KILLED = "worker 1 was killed by SIGKILL (9)"
CLOSED = "worker 0 ended with exit code 1: RuntimeError: Connection closed by peer"
LATE = "no end within 60 s, after all_reduce of 8 B"


@pytest.mark.parametrize(
    ("failed", "cause"),
    [
        ([], {}),
        ([("n1", KILLED, 1)], {"n1": KILLED}),
        ([("n0", CLOSED, 2), ("n1", CLOSED, 1)],
         {"n1": f"{CLOSED}; 1 other task failed after it"}),
        # What is killed is a cause, whoever has told of it first.
        ([("n0", CLOSED, 1), ("n1", KILLED, 2), ("n2", CLOSED, 3)],
         {"n1": f"{KILLED}; 2 other tasks failed after it"}),
        ([("n0", LATE, 1), ("n2", CLOSED, 2)],
         {"n2": f"{CLOSED}; 1 other task failed after it"}),
        ([("n1", LATE, 1)], {"all tasks": LATE}),  # nobody knows who hangs
    ],
)  # fmt: skip
def test_the_cause(failed, cause):
    ends = [
        (host, {"backend": "", "problem": problem, "order": order, "rows": []})
        for host, problem, order in failed
    ]
    assert conductor._cause(ends) == cause


def test_sizes():
    sizes = [conductor._size(number) for number in (8, 2**20, 2**30, 1.5 * 2**40)]
    assert sizes == ["0.0 MiB", "1.0 MiB", "1.0 GiB", "1536.0 GiB"]
