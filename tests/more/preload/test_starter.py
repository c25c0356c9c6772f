"""The import, and the fork server that splits off; or why each worker imports alone."""

from __future__ import annotations

import textwrap

import pytest

from tests.support import ROOT
from tests.support.cluster.bound import ALL, needs_two_cpus
from tests.support.forks import ForkingProcess
from tests.support.patience import NEVER_S
from tests.support.processes import run_python

BEGIN = """
import os, re, signal, subprocess, sys, time
from torchrun_hpc.preload import starter
from torchrun_hpc.planning.workers import Preload
from torchrun_hpc.errors import Setting
from torchrun_hpc.preload import imports
from tests.support.both_forms import split_off

sys.stdout.reconfigure(line_buffering=True)  # workers write to it, too

def start(*modules, words=("script.py",), variables={}, later={}, is_bound=False):
    setting = Setting(",".join(modules), "--hpc-preload")
    preload = Preload(modules, setting, variables, is_bound=is_bound)
    preloaded = split_off(preload, words)
    environ = {**os.environ, **variables, **later}
    problem = preloaded.check(environ, is_reporter=True)
    preloaded.problem = problem and str(preload.not_used(problem)) or None
    return preloaded

def worker(preloaded, **environ):
    command = [sys.executable, "-u", "script.py"]
    return preloaded.fork(command, {**os.environ, **environ}, None, None)

def ended(pid):
    while True:
        try:
            if open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[0] == "Z":
                return True
        except FileNotFoundError:
            return True
        time.sleep(0.01)
"""
LEAVES = "in a fork, OpenMP hangs or leaves the fork's CPUs"
PREFIX = "HPC169 --hpc-preload={} is not used, so each worker imports by itself: "


@pytest.fixture(scope="module")
def forks():
    with ForkingProcess(BEGIN) as started:
        yield started


@pytest.fixture
def run(tmp_path, forks):
    """Run a program, in a folder with modules; return what it printed."""

    def run(program, *options, script="", environ=None, **modules):
        modules["script"] = script
        for name, text in modules.items():
            (tmp_path / f"{name}.py").write_text(textwrap.dedent(text))
        program = textwrap.dedent(program)
        if not options:
            return forks.run(program, cwd=tmp_path, environ=environ or {})
        # With -I, Python does not read PYTHONPATH.
        path = f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
        return run_python(*options, "-c", path + BEGIN + program, cwd=tmp_path)

    return run


A_THREAD = f"""
from threading import Thread
from time import sleep
Thread(target=sleep, args=({NEVER_S},), daemon=True, name="poller").start()
"""

# A module of this name, its text, and why it cannot be preloaded.
REASONS = {
    "missing": (
        None,
        "missing cannot be imported (ModuleNotFoundError: No module named 'missing')",
    ),
    "wrong": (
        "1 / 0",
        "wrong cannot be imported (ZeroDivisionError: division by zero)",
    ),
    "ends": ("raise SystemExit(3)", "ends cannot be imported (SystemExit: 3)"),
    "exits": ("import os; os._exit(0)", "an import ended the fork server"),
    "threads": (A_THREAD, "the import leaves 1 thread behind (poller)"),
    "moves": ("import os; os.chdir('/')", "the import changes the working directory"),
    "reads": (
        "import os; rank = int(os.environ.get('RANK', 0))",
        "reads reads RANK at its import, but each worker has its own value",
    ),
    "talks": ("raise ValueError('1\\n2')", "talks cannot be imported (ValueError: 1)"),
    "driver": (
        "file = open(__file__)",
        "the import initialised a device ({folder}/driver.py)",
    ),
}


@pytest.mark.parametrize("name", REASONS)
def test_what_cannot_be_preloaded(run, tmp_path, name):
    text, reason = REASONS[name]
    program = f"""
        imports._NO_DEVICE = re.compile("(?!.*/driver)")
        preloaded = start("{name}")
        print(preloaded.problem, preloaded.server)
        assert worker(preloaded) is None
        """
    done = run(program, **({name: text} if text else {}))
    reason = reason.format(folder=tmp_path)
    assert (done.out, done.err) == (f"{PREFIX.format(name)}{reason} 0\n", "")


@needs_two_cpus
def test_a_module_that_binds_the_process(run):
    """As OpenMP libraries do. Without torch, their threads can leave a bound fork's."""
    done = run(
        """
        preloaded = start("binds")
        print(preloaded.problem, worker(preloaded).wait())
        print(start("binds", is_bound=True).problem)
        """,
        binds="import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})",
        script="import os; print(sorted(os.sched_getaffinity(0)))",
    )
    problem = f"{PREFIX.format('binds')}{LEAVES}"
    expected = [str(ALL), "None 0", problem]
    assert (done.out.splitlines(), done.err) == (expected, "")


@needs_two_cpus
def test_openmp_that_hangs_in_a_fork(run):
    """GCC's library does, if its process has already computed with several threads."""
    program = """
        imports.limits.FORK_TRIAL_TIMEOUT = 1
        print(start("computes").problem)
        """
    computes = "import torch; torch.set_num_threads(2); torch.ones(2**16).add_(1)"
    done = run(program, computes=computes)
    assert done.out == f"{PREFIX.format('computes')}{LEAVES}\n"


def test_what_modules_do_is_not_for_the_agent(run):
    done = run(
        """
        preloaded = start("does", "pops", variables={"OMP_NUM_THREADS": "1"})
        print(signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL)
        print(sys.excepthook is sys.__excepthook__, "NEW" in os.environ)
        print(worker(preloaded).wait())
        """,
        does="""
            import atexit, os, signal, sys
            signal.signal(signal.SIGUSR1, print)
            sys.excepthook = print
            os.environ["NEW"] = "1"
            atexit.register(print, "at the end")
            """,
        pops="import os; os.environ.pop('OMP_NUM_THREADS')",
        script="""
            import os, signal, sys
            print(signal.getsignal(10), sys.excepthook, os.environ["NEW"])
            """,
    )
    prints = "<built-in function print>"
    expected = ["True", "True False", f"{prints} {prints} 1", "at the end", "0"]
    assert (done.out.splitlines(), done.err) == (expected, "")


def test_a_process_with_many_open_files(run):
    """As the head node of a large job has them; select(2) knows only 1024."""
    done = run(
        """
        import resource
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (2048, hard))
        files = [os.dup(1) for _ in range(1100)]
        preloaded = start("json")
        print(preloaded.problem, worker(preloaded).wait())
        """
    )
    assert (done.out, done.err) == ("None 0\n", "")


def test_a_process_that_ignores_the_ends_of_children(run):
    """Nobody gets exit codes then, so each worker is started by exec."""
    program = """
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        print(start("json").problem)
        """
    done = run(A_THREAD + textwrap.dedent(program))
    problem = "[Errno 10] No child processes"
    assert done.out == f"{PREFIX.format('json')}{problem}\n", done.err


def test_signals_to_the_parent_before_the_end(run):
    """The fork server reads the news of the end first, as its number is lower."""
    done = run(
        """
        got = []
        for number in (40, 41):
            signal.signal(number, lambda *_: got.append(1))
        preloaded = start("json")
        codes = {worker(preloaded).wait() for _ in range(20)}
        while len(got) < 40:
            time.sleep(0.01)
        print(codes)
        """,
        script="""
            import os
            os.kill(os.getppid(), 40)
            os.kill(os.getppid(), 41)
            os._exit(3)
            """,
    )
    assert (done.out, done.err) == ("{3}\n", "")


def test_a_library_that_ends_its_threads_before_a_fork(run):
    """So does OpenBLAS, which numpy has, and torch with it."""
    done = run(
        """
        preloaded = start("numpy")
        print(preloaded.problem, worker(preloaded).wait())
        """,
        script="import numpy, threading\nnumpy.ones((9, 9)) @ numpy.ones((9, 9))",
        environ={"OPENBLAS_NUM_THREADS": "2"},
    )
    assert (done.out, done.err) == ("None 0\n", "")


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["-u"], None),
        (["-O"], "python -O applies only to the launcher"),
        (["-u", "-X", "dev"], "python -X applies only to the launcher"),
        (["-I"], "python -I applies only to the launcher"),
    ],
)
def test_options_of_python(run, options, reason):
    done = run("print(start('json').problem)", *options)
    assert done.out == (f"{PREFIX.format('json')}{reason}\n" if reason else "None\n")


def test_variables_are_set_for_the_import_only(run):
    done = run(
        """
        preloaded = start("reads", variables={"OMP_NUM_THREADS": "3", "OTHER": "4"})
        print("OMP_NUM_THREADS" in os.environ, "OTHER" in os.environ, sys.path[0] == "")
        worker(preloaded, OTHER="5").wait()
        preloaded = split_off(preloaded._preload, ["script.py"])
        print(preloaded.check(os.environ, is_reporter=True))
        """,
        reads="import os\nread = os.environ['OMP_NUM_THREADS'], os.environ['OTHER']",
        script="import os, reads\nprint(reads.read, os.environ['OTHER'])",
        environ={"OMP_NUM_THREADS": ""},
    )
    reason = (
        "OMP_NUM_THREADS was 3 at the import, but is not set for the workers. Export it"
    )
    assert done.out.splitlines() == [
        "True False True",  # the first was empty
        "('3', '4') 5",
        reason,
    ]


def test_variables_that_come_too_late(run):
    """A fork acts on the others, or they are not read at the import."""
    done = run(
        """
        for name in "PYTHONHASHSEED", "TORCH_LOGS":
            print(start("json", later={name: "1"}).problem)
        others = "PYTHONFAULTHANDLER", "TORCH_CPP_LOG_LEVEL", "MASTER_ADDR"
        print(start("json", later=dict.fromkeys(others, "1")).problem)
        """
    )
    reason = "was not set at the import, but is 1 for the workers. Export it"
    assert done.out.splitlines() == [
        f"{PREFIX.format('json')}PYTHONHASHSEED {reason}",
        f"{PREFIX.format('json')}TORCH_LOGS {reason}",
        "None",
    ]


def test_a_crash_is_described_as_python_would(run):
    done = run(
        """
        os.environ.pop("PYTHONFAULTHANDLER", None)
        preloaded = start("json")
        for environ in {}, *({"PYTHONFAULTHANDLER": value} for value in ("", "0", "1")):
            assert worker(preloaded, **environ).wait() == 0
        """,
        script="import faulthandler\nprint(faulthandler.is_enabled())",
    )
    assert (done.out.split(), done.err) == (["False"] * 2 + ["True"] * 2, "")


def test_what_was_imported_before_has_read_other_variables(run):
    done = run(
        """
        import torch
        for name in "OMP_NUM_THREADS", "OMP_SCHEDULE":
            print(start("torch", variables={name: "1"}).problem)
        """
    )
    reason = "OMP_SCHEDULE was not set at the import, but is 1 for the workers. "
    known = PREFIX.format("torch") + reason + "Export it"
    assert done.out.splitlines() == ["None", known]


def test_modules_are_found_as_the_script_finds_them(run, tmp_path):
    (tmp_path / "project").mkdir()
    for folder in (".", "project"):
        (tmp_path / folder / "mine.py").write_text(f"where = {folder!r}\n")
    (tmp_path / "project" / "mine.py").open("a").write("import sys\nargs = sys.argv")
    program = "import mine\nprint(mine.where, mine.args)\n"
    (tmp_path / "project" / "script.py").write_text(program)
    done = run(
        """
        words = ["project/script.py", "--lr", "1"]
        preloaded = start("mine", words=words)
        command = [sys.executable, "-u", *words]
        print(preloaded.fork(command, dict(os.environ), None, None).wait())
        print(sys.argv, sys.path[0] == "")
        """
    )
    seen = "project ['project/script.py', '--lr', '1']\n0\n['-c'] True\n"
    assert (done.out, done.err) == (seen, "")


def test_a_fork_server_that_is_killed(run):
    """Its workers end with it; the next ones are started by exec."""
    done = run(
        """
        preloaded = start("json")
        first = worker(preloaded)
        os.kill(preloaded.server, signal.SIGKILL)
        print(first.wait(), first.poll(), ended(first.pid))
        print(worker(preloaded), worker(preloaded))
        """,
        script=f"import time\ntime.sleep({NEVER_S})",
    )
    assert done.out == "-9 -9 True\nNone None\n"
    reason = f"{PREFIX.format('json')}the fork server has ended, perhaps killed"
    assert done.err.startswith("torchrun_hpc: warning[HPC169]: ")
    assert done.err.endswith(f"{reason.partition(' ')[2]}\n")


def test_an_agent_that_is_killed_leaves_nobody_behind(run):
    """Two processes must end: the fork server and a worker."""
    done = run(
        """
        agent = os.fork()
        if agent == 0:
            preloaded = start("json")
            print(preloaded.server, worker(preloaded).pid, file=open("pids", "w"))
            os.kill(os.getpid(), signal.SIGKILL)
        print(os.waitpid(agent, 0)[1])
        print([ended(pid) for pid in open("pids").read().split()])
        """,
        script=f"import time\ntime.sleep({NEVER_S})",
    )
    assert (done.out, done.err) == ("9\n[True, True]\n", "")


def test_signals_to_all_of_a_group_are_not_for_the_fork_server(run):
    """Ctrl-C, and what a scheduler sends to all processes of a task."""
    done = run(
        """
        preloaded = start("json")
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
            signal.signal(number, lambda *_: None)
            os.killpg(0, number)
            os.kill(preloaded.server, number)
        print(worker(preloaded).wait())
        """
    )
    assert (done.out, done.err) == ("0\n", "")


def test_an_import_that_takes_long(run):
    """It lasts until that has been said."""
    done = run(
        f"""
        starter.limits.FIRST_REPORT = 0.2
        starter.limits.NEXT_REPORT = {NEVER_S}
        write = starter.console.write
        starter.console.write = lambda *args: (write(*args), open("said", "x"))
        print(start("slow").problem)
        """,
        slow="import os, time\nwhile not os.path.exists('said'):\n    time.sleep(0.01)",
    )
    text = "note[HPC170]: the import of slow has taken 0 s so far"
    assert (done.out, done.err) == ("None\n", f"torchrun_hpc: {text}\n")


def test_other_programs_are_not_forked_and_none_is_after_the_end(run):
    done = run(
        """
        preloaded = start("json")
        for command in (["numactl", sys.executable, "-u"], [sys.executable, "-O"]):
            assert preloaded.fork(command, {}, None, None) is None
        server = preloaded.server
        preloaded.end()
        print(ended(server), worker(preloaded))
        """
    )
    assert (done.out, done.err) == ("True None\n", "")


def test_many_workers_and_restarts(run):
    """Of each the agent keeps two files open until it ends."""
    done = run(
        """
        import resource
        preloaded = start("json")
        resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100))
        for attempt in range(2):
            workers = [worker(preloaded, CODE=str(n)) for n in range(40)]
            assert [w.wait() for w in workers] == [*range(40)]
            assert len({w.pid for w in workers}) == 40
        """,
        script="import os, sys\nsys.exit(int(os.environ['CODE']))",
    )
    assert (done.code, done.out, done.err) == (0, "", "")


def test_a_number_stays_a_worker_s_until_torch_has_its_code(run):
    """Torch signals a worker's group after a poll; the watch also reads its code."""
    done = run(
        """
        preloaded = start("json")
        workers = [worker(preloaded) for _ in range(3)]
        for one in workers:
            while one.returncode is None:
                time.sleep(0.01)
            os.killpg(one.pid, signal.SIGTERM)
        first, second, third = (one.pid for one in workers)
        print(workers[0].poll(), workers[1].wait())
        del workers, one  # nobody will ask the third one
        for pid in first, second, third:
            while os.path.exists(f"/proc/{pid}"):
                time.sleep(0.01)
        preloaded.end()
        """,
        script="raise SystemExit(3)",
    )
    assert (done.code, done.out, done.err) == (0, "3 3\n", "")
