"""``--hpc-without-patches``: torch is as it is there, and all the rest works."""

from __future__ import annotations

import json
import signal

import pytest

from tests.support.processes import clean_environ, run_launcher, run_python
from tests.support.stock.inside_torch import expected_state, make_plan
from tests.support.stock.side_by_side import OURS, Command
from torchrun_hpc.agent.patches import registry
from torchrun_hpc.agent.patches.agent import ActTogether, WatchWorkers
from torchrun_hpc.agent.patches.registry import PATCHES, PatchState
from torchrun_hpc.host import capabilities

OPTION, VARIABLE = "--hpc-without-patches", "PET_HPC_WITHOUT_PATCHES"
NAMES = [patch.NAME for patch in PATCHES]


@pytest.mark.usefixtures("torch_again")
@pytest.mark.parametrize("patch", PATCHES, ids=NAMES)
def test_one_is_left_out_and_no_other(patch, monkeypatch):
    monkeypatch.setattr(patch, "apply", None)
    monkeypatch.setattr(patch, "fits", lambda: False)  # nobody has to know
    name = NAMES[PATCHES.index(patch)]
    outcomes = registry.apply_patches(make_plan(without_patches=(name,)))
    for outcome in outcomes:
        state = expected_state(outcome.patch)
        if outcome.patch is patch and state is PatchState.APPLIED:
            state = PatchState.LEFT_OUT
        assert outcome.state is state, outcome.patch.NAME
    assert registry.left_out(outcomes) == []


@pytest.fixture(scope="module")
def launches(launcher, tmp_path_factory):
    """Two workers, without each in turn, and with what would need it."""
    folder = tmp_path_factory.mktemp("without")
    # In one piece: the two workers share a pipe.
    (folder / "train.py").write_text("print('trained\\n', end='')\n")
    needs = {
        "fork_workers": ("--hpc-preload=torch",),
        "bind_workers": ("--hpc-bind=even",),
        "watch_workers": ("--hpc-stall-report=600",),
    }
    words = "--nproc-per-node=2", "train.py"
    commands = [
        Command(OURS, [f"{OPTION}={name}", *needs.get(name, ()), *words])
        for name in NAMES
    ]
    results = launcher.launch_all(commands, cwd=folder)
    return dict(zip(NAMES, results, strict=True))


# More words in the start line, or a warning.
MORE = {
    "fork_workers": "HPC169]: --hpc_preload=torch is not used",
    "bind_workers": "HPC222]: --hpc_bind=even binds nothing: ",
    "watch_workers": "HPC077]: --hpc_stall_report=600 has no effect",
}


@pytest.mark.xdist_group("without")
@pytest.mark.parametrize("name", NAMES)
def test_workers_are_started_without_it(name, launches):
    done = launches[name]
    assert (done.code, done.out) == (0, "trained\n" * 2), done.err
    note = f"HPC089]: --hpc_without_patches={name} switches these patches off"
    assert note in done.own_lines[0]
    assert "HPC080" not in done.err
    assert MORE.get(name, "") in "\n".join(done.own_lines)


def test_the_dry_run_shows_it():
    done = run_launcher(
        "--hpc-dry-run=json", "train.py", **{VARIABLE: " host_name,agent ,"}
    )
    (node,) = json.loads(done.out)["nodes"]
    states = {patch["name"]: patch["state"] for patch in node["patches"]}
    assert states["agent"] == "left out: --hpc-without-patches"
    assert states["forward_signals"] == "patched"
    assert [note["code"] for note in node["messages"]["notes"]] == ["HPC089"]


def test_a_name_that_no_patch_has():
    done = run_launcher("--hpc-dry-run", f"{OPTION}=agent,fresh-store", "train.py")
    assert done.code == 2
    (line,) = done.own_lines
    assert line == (
        "torchrun_hpc: error[HPC088]: --hpc_without_patches=agent,fresh-store: "
        "there is no patch 'fresh-store'. Did you mean fresh_store? There are: "
        f"{', '.join(NAMES)}"
    )


AUTO = """
import torchrun_hpc.auto
from torchrun_hpc.agent.patches.state_as_json import JsonPickle
from torch.distributed.elastic.rendezvous import dynamic_rendezvous
print(dynamic_rendezvous.pickle is JsonPickle)
"""


@pytest.mark.parametrize("names", ["state_as_json", "nobody"])
def test_a_program_that_imports_auto(names, tmp_path):
    """A name that there is not is for the launch to refuse."""
    environ = clean_environ() | {VARIABLE: names}
    done = run_python("-c", AUTO, environ=environ, cwd=tmp_path)
    assert (done.code, done.own_lines) == (0, []), done.err
    assert done.out.strip() == str(names != "state_as_json")


SIGNALLED = """
import os, signal, time
signal.signal(signal.SIGUSR1, signal.SIG_IGN)
os.kill(os.getppid(), signal.SIGUSR1)
time.sleep(900)
"""


def test_a_signal_that_nobody_forwards_ends_the_agent(launcher, tmp_path):
    """As it does stock torchrun: it is not swallowed."""
    (tmp_path / "train.py").write_text(SIGNALLED)
    words = [f"{OPTION}=forward_signals", "train.py"]
    assert launcher.launch(OURS, words, cwd=tmp_path).code == -signal.SIGUSR1


@pytest.mark.parametrize("patch", [ActTogether, WatchWorkers])
def test_what_others_need_and_does_not_fit(patch, monkeypatch):
    assert registry.incompatible() == ()
    lost = capabilities.Capability(">=2.0", present=False)
    monkeypatch.setattr(patch, "IS_FOR", lost)
    assert registry.incompatible() == (patch.NAME,)
