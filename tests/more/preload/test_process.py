"""A script sees the same, whether exec or a fork has started it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

PROBE = Path(__file__).with_name("all_it_can_see.py")

DECODE = json.JSONDecoder().raw_decode

# Before a worker starts: a preparation of the agent, or of the program that started it.
CASES: dict[str, dict[str, Any]] = {
    "as it is": {},
    "umask": {"preparation": "os.umask(0o27)"},
    "signals are ignored": {
        "preparation": "import signal\n"
        "for number in (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):\n"
        "    signal.signal(number, signal.SIG_IGN)"
    },
    "signals are blocked": {
        "preparation": "import signal\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2])"
    },
    "a file is inherited": {
        "preparation": "os.set_inheritable(os.open('/', os.O_RDONLY), True)"
    },
    "limits": {
        "preparation": "import resource\n"
        "resource.setrlimit(resource.RLIMIT_CORE, (0, 0))\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (123, 456))"
    },
    "no standard input": {"closed": "<&-"},
    "safe path": {"environ": {"PYTHONSAFEPATH": "1"}},
    "encoding": {"environ": {"PYTHONIOENCODING": "latin-1:replace"}},
    "no bytecode": {
        "environ": {
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTHONOPTIMIZE": "1",
            "LC_ALL": "C",
        }
    },
    "no text": {"environ": {"ONLY_IN_C": "ü", "NOT_TEXT": "\udcff"}},
}


def compare(by_exec, by_fork):
    assert by_exec[0] == by_fork[0] == 0, (by_exec, by_fork)
    assert by_exec[2] == by_fork[2] == ""
    (seen, end), (expected, _) = (DECODE(form[1]) for form in (by_fork, by_exec))
    assert by_fork[1][end:] == "\nwritten by C"
    assert list(seen["__main__"]) == list(expected["__main__"])
    assert seen == expected
    return seen


@pytest.mark.parametrize("case", CASES)
def test_what_a_script_can_see(in_both_forms, tmp_path, case):
    shutil.copy(PROBE, tmp_path / "probe.py")
    seen = compare(*in_both_forms("probe.py", "--lr", "0.1 0.2", **CASES[case]))
    assert seen["argv"][0] == ["probe.py", "--lr", "0.1 0.2"]
    assert seen["parent-death signal"] == 9


FOLDER, ARCHIVE = "folder", "archive.zip"


@pytest.mark.parametrize(
    "words",
    [
        *("./probe.py", "link.py", f"{FOLDER} 1", f"./{FOLDER}/", ARCHIVE),
        *(f"-m {FOLDER} 1", f"-m {FOLDER}.inner", "-m probe"),
    ],
)
def test_however_it_is_named(in_both_forms, tmp_path, words):
    (tmp_path / FOLDER).mkdir()
    for name in ("probe.py", f"{FOLDER}/__main__.py", f"{FOLDER}/inner.py"):
        shutil.copy(PROBE, tmp_path / name)
    (tmp_path / FOLDER / "elsewhere.py").symlink_to(PROBE)
    (tmp_path / "link.py").symlink_to(f"{FOLDER}/inner.py")
    shutil.make_archive(str(tmp_path / "archive"), "zip", tmp_path / FOLDER)
    compare(*in_both_forms(*words.split()))
