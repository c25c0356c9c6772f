"""Torch's agent, which starts and watches the workers of a node, extended by parts.

Each part fits the installed torch or not, and can be switched off. Those that remain
become one class, which torch finds instead of its own.
"""

from __future__ import annotations

import functools
import inspect
import logging
import os
import subprocess
import sys
from contextlib import suppress
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar

from torch.distributed.elastic.agent.server import api as server
from torch.distributed.elastic.agent.server import local_elastic_agent
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import api
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.rendezvous import registry as rendezvous
from torch.distributed.launcher import api as launcher

from torchrun_hpc import limits
from torchrun_hpc.agent.end import failure_of
from torchrun_hpc.agent.patches import Hooks, Patch, has, replace, takes, wrap
from torchrun_hpc.agent.signals import FOREVER
from torchrun_hpc.failures.worker import Worker, exit_code_of
from torchrun_hpc.host import capabilities
from torchrun_hpc.planning.resources import threads_of
from torchrun_hpc.preload.worker import bound, end_with_parent
from torchrun_hpc.rendezvous.errors import (
    JobFailedError,
    NotNeededError,
    RoundOverError,
)
from torchrun_hpc.rendezvous.handler import SchedulerRendezvous
from torchrun_hpc.variables import CPU_LIST, LOCAL_RANK

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torchrun_hpc.failures.watch import Watch
    from torchrun_hpc.planning.plan import LaunchPlan

_log = logging.getLogger(__name__)

_torch: Any = api

_AGENT = "LocalElasticAgent"

# Where torch's classes and functions are, which parts name without their modules.
_MODULES: tuple[Any, ...] = (api, server, local_elastic_agent, rendezvous, launcher)

# Functions outside the agent, by the method of `Part` that stands for each; then their
# parameters, if these matter.
_FUNCTIONS: dict[str, tuple[str, ...]] = {
    "find_rendezvous": ("get_rendezvous_handler", "params"),
    "start_worker": ("SubprocessHandler._popen", "self", "args", "env"),
    "close_context": ("PContext.close",),
    "handle_signal": ("_terminate_process_handler", "signum", "frame"),
}


class PartAgent(LocalElasticAgent):
    """Torch's agent, as a part extends it.

    A program's agent may be between this class and torch's. So all names besides
    torch's begin with ``_hpc``.
    """

    _hpc: ClassVar[type[Part]]


class Part(Patch):
    """A part of the agent.

    The methods of its `Extension` have the names of torch's, and call the next part by
    ``super()``. So do the class methods below, which stand for functions outside the
    agent; ``original`` is torch's. In `registry.PATCHES`, later parts are around
    earlier ones.

    Attributes:
        USES: Functions of torch on which this part relies, each with names that it
            must use.
    """

    USES: ClassVar[tuple[tuple[str, ...], ...]] = ()
    Extension: ClassVar[type[PartAgent]] = PartAgent
    plan: ClassVar[LaunchPlan]
    hooks: ClassVar[Hooks]

    @classmethod
    def fits(cls) -> bool:
        """Check what the part extends, with its parameters, and what it relies on."""
        if cls.Extension is not PartAgent and not _fits_agent(cls.Extension):
            return False
        functions = (_FUNCTIONS[name] for name in _FUNCTIONS if name in vars(cls))
        return all(
            takes(*_place(name), *parameters) if parameters else has(*_place(name))
            for name, *parameters in functions
        ) and all(capabilities.uses(_of_torch(name), *uses) for name, *uses in cls.USES)

    @classmethod
    def find_rendezvous(cls, original: Any, parameters: Any) -> Any:
        """Return the rendezvous of an agent."""
        return original(parameters)

    @classmethod
    def start_worker(cls, original: Any, handler: Any, args: Any, env: Any) -> Any:
        """Start the process of a worker."""
        return original(handler, args, env)

    @classmethod
    def close_context(cls, original: Any, *args: Any, **options: Any) -> None:
        """End the workers."""
        original(*args, **options)

    @classmethod
    def handle_signal(cls, original: Any, number: int, frame: Any) -> None:
        """Handle a death signal."""
        original(number, frame)


def _place(name: str) -> tuple[Any, str]:
    """Return the class or module of a function of torch, and the function's name."""
    owner, _, function = name.rpartition(".")
    home = next(m for m in _MODULES if hasattr(m, owner or function))
    return getattr(home, owner) if owner else home, function


def _of_torch(name: str) -> Any:
    """Return a function of torch by its dotted name; raise something without it."""
    function = getattr(*_place(name))
    if getattr(function, "__isabstractmethod__", False):
        raise LookupError(name)
    return function


def _fits_agent(agent: type[PartAgent]) -> bool:
    """Return whether torch's agent has the methods that a part extends."""
    for name, method in vars(agent).items():
        if inspect.isfunction(method):
            theirs = inspect.signature(_of_torch(f"{_AGENT}.{name}")).parameters
            ours = inspect.signature(method).parameters
            if "args" not in ours and [*ours] != [*theirs]:
                return False
    return is_extensible()


def is_extensible() -> bool:
    """Return whether agents are created by a name that can be replaced."""
    agent = getattr(launcher, _AGENT, None)  # a program may have another one
    is_class = isinstance(agent, type) and issubclass(agent, LocalElasticAgent)
    return is_class and capabilities.uses(launcher.launch_agent, _AGENT)


def extend(parts: Sequence[type[Part]], plan: LaunchPlan | None, hooks: Hooks) -> None:
    """Replace torch's agent by one with these parts."""
    changes: Any = type("Changes", (*reversed(parts), Part), {})
    changes.plan, changes.hooks = plan, hooks
    bases = [
        part.Extension for part in reversed(parts) if part.Extension is not PartAgent
    ]
    if bases:
        agent = type(_AGENT, (*bases, getattr(launcher, _AGENT)), {"_hpc": changes})
        replace(launcher, _AGENT, agent)
    for method, (name, *_) in _FUNCTIONS.items():
        if any(method in vars(part) for part in parts):
            wrap(*_place(name), getattr(changes, method))


# --- the job --------------------------------------------------------------------------


class ActTogether(Part):
    """Agents of one job act together if they meet in the scheduler rendezvous.

    Torch's agent counts only its own restarts, and does not tell the others when it
    gives up. At its end it waits for others that may never come, and ignores signals.
    """

    NAME = "agent"
    TARGET = _AGENT
    REASON = (
        "an agent that gives up leaves the others running (pytorch#111646, #99051), "
        "and restarts are counted per agent (pytorch#108158)"
    )
    USES = (
        ("launch_agent", "get_rendezvous_handler"),
        ("SimpleElasticAgent.__init__", "_remaining_restarts"),
    )

    is_found: ClassVar[bool] = False

    @classmethod
    def fits(cls) -> bool:
        """Also check the fields of a result."""
        results = {*inspect.signature(server.RunResult).parameters}
        return super().fits() and {"state", "return_values"} <= results

    @classmethod
    def find_rendezvous(cls, original: Any, parameters: Any) -> Any:
        """Let torch find our rendezvous, once."""
        ours = cls.hooks.rendezvous
        if cls.is_found or ours is None or ours.get_backend() != parameters.backend:
            return super().find_rendezvous(original, parameters)
        cls.is_found = True
        ours.run_id = parameters.run_id
        return ours

    class Extension(PartAgent):
        """The agent with this part."""

        @property
        def _hpc_rendezvous(self) -> SchedulerRendezvous | None:
            handler = self._worker_group.spec.rdzv_handler
            return handler if isinstance(handler, SchedulerRendezvous) else None

        def _rendezvous(self, worker_group: Any) -> None:
            """Meet the others; each agent has as many restarts left as the job."""
            while True:
                # An agent was lost before the workers began.
                with suppress(RoundOverError):
                    super()._rendezvous(worker_group)
                    break
            if self._hpc_rendezvous is not None:
                left = worker_group.spec.max_restarts - self._hpc_rendezvous.restarts
                self._remaining_restarts = max(left, 0)

        def _invoke_run(self, *args: Any, **options: Any) -> Any:
            """Run the workers; a spare may have had none when the job ends well."""
            try:
                return super()._invoke_run(*args, **options)
            except NotNeededError:
                workers = self._worker_group.workers
                nothing = {worker.global_rank: None for worker in workers}
                state = server.WorkerState.SUCCEEDED
                return server.RunResult(state, return_values=nothing)

        def _monitor_workers(self, worker_group: Any) -> Any:
            ours = self._hpc_rendezvous
            if ours and ours.has_spares and ours.num_nodes_waiting():
                return server.RunResult(server.WorkerState.HEALTHY)
            return super()._monitor_workers(worker_group)

        def _shutdown(self, *args: Any, **options: Any) -> None:
            error = sys.exc_info()[1]
            if self._hpc_rendezvous is not None and isinstance(error, SignalException):
                self._hpc_rendezvous.give_up(failure_of(error))
            super()._shutdown(*args, **options)

        def _exit_barrier(self) -> None:
            if self._hpc_rendezvous is None:
                super()._exit_barrier()  # type: ignore[no-untyped-call]
            else:
                self._hpc_rendezvous.finish()


class KeepOpenOnRestart(Part):
    """An agent that stops its workers for a restart does not close the rendezvous.

    Torch 2.3 closes it, so no restart succeeds. The agent hides the rendezvous from
    itself meanwhile. It still closes the rendezvous when it ends.
    """

    NAME = "keep_open_on_restart"
    TARGET = "LocalElasticAgent._stop_workers"
    REASON = "a restart closes the rendezvous and fails (pytorch#123678)"
    IS_FOR = capabilities.STOP_CLOSES_RENDEZVOUS
    USES = (("LocalElasticAgent.__init__", "_rdzv_handler"),)

    class Extension(PartAgent):
        """The agent with this part."""

        def _stop_workers(self, *args: Any, **options: Any) -> None:
            handler: Any = self._rdzv_handler
            nothing: Any = None
            self._rdzv_handler = nothing
            try:
                super()._stop_workers(*args, **options)
            finally:
                self._rdzv_handler = handler


# --- the start of a worker ------------------------------------------------------------


class ParentDeathSignal(Patch):
    """A worker ends when its agent ends, even if the agent is killed.

    Workers have their own sessions, so they outlive a killed agent. Slurm with cgroups
    cleans up. ssh, PBS and mpirun sometimes do not, and the next job finds the GPUs
    taken.

    A worker's own children do not end with it. DataLoader workers check their parent. A
    program that a shell has started continues, unless the shell used ``exec``. The
    kernel clears the setting for a process that changes its user or gains capabilities,
    as set-user-ID container starters do. For workers that are Python functions, torch
    itself sets SIGINT.
    """

    NAME = "parent_death_signal"
    TARGET = "SubprocessHandler._popen"
    REASON = "workers keep running if the agent is killed (pytorch#76287)"

    @classmethod
    def fits(cls) -> bool:
        """Check that the workers are started here, and no code runs before them."""
        popen, home = _torch.SubprocessHandler._popen, cls._home()
        return (
            sys.platform == "linux"
            and takes(_torch.SubprocessHandler, "_popen", "self", "args", "env")
            and capabilities.uses(popen, "Popen")
            and (has(home, "Popen") or home.subprocess is subprocess)
            and "preexec_fn" not in str(popen.__code__.co_consts)
        )

    @classmethod
    def apply(cls, _plan: object, _hooks: object) -> None:
        """Let each worker ask the kernel to end it with its parent."""
        home = cls._home()
        if has(home, "Popen"):  # as in newer ones
            wrap(home, "Popen", cls._popen)
        else:
            popen = functools.partial(cls._popen, subprocess.Popen)
            ours = SimpleNamespace(**{**vars(subprocess), "Popen": popen})
            replace(home, "subprocess", ours)

    @staticmethod
    def _popen(original: Any, *args: Any, **options: Any) -> Any:
        return original(*args, preexec_fn=end_with_parent(os.getpid()), **options)

    @staticmethod
    def _home() -> Any:
        return sys.modules[_torch.SubprocessHandler.__module__]


class ForkWorkers(Part):
    """Workers are forks of a process that has already imported torch.

    Used with preloading only. A worker that cannot be a fork is started as usual.
    """

    NAME = "fork_workers"
    TARGET = "SubprocessHandler._popen"
    REASON = "each worker of a node imports torch again (as in pytorch#103117)"
    USES = (("SubprocessHandler._popen", "_stdout", "_stderr"),)

    @classmethod
    def is_wanted(cls, plan: LaunchPlan) -> bool:
        """Return whether modules are preloaded."""
        return plan.workers.preload is not None

    @classmethod
    def start_worker(cls, original: Any, handler: Any, args: Any, env: Any) -> Any:
        """Fork the worker, if possible."""
        worker = cls.hooks.fork(args, env, handler._stdout, handler._stderr)
        if worker is None:
            return super().start_worker(original, handler, args, env)
        return worker


class BindWorkers(Part):
    """Each worker runs on its own CPUs, with ``--hpc-bind`` only.

    A worker inherits the CPUs of the thread that starts it. This needs no ``numactl``,
    unlike torch's ``--numa-binding``.
    """

    NAME = "bind_workers"
    TARGET = "SubprocessHandler._popen"
    REASON = "workers share the CPUs of their agent (pytorch#115305)"

    @classmethod
    def is_wanted(cls, plan: LaunchPlan) -> bool:
        """Return whether each worker has CPUs of its own."""
        return plan.workers.binding is not None and bool(plan.workers.binding.shares)

    @classmethod
    def start_worker(cls, original: Any, handler: Any, args: Any, env: Any) -> Any:
        """Bind the thread that starts the worker."""
        binding: Any = cls.plan.workers.binding
        # With --virtual-local-rank (since 2.3), LOCAL_RANK is 0 for all workers.
        rank = getattr(handler, "local_rank_id", None)
        rank = int(env[LOCAL_RANK]) if rank is None else rank
        share = binding.shares[rank]
        threads = threads_of(binding, share)
        cpus = {CPU_LIST: share.cpu_list} if env.get(CPU_LIST) else {}
        env = {**env, **threads, **cpus}
        with bound(share, f"the worker of local rank {rank}"):
            return super().start_worker(original, handler, args, env)


# --- running workers ------------------------------------------------------------------


class ForwardSignals(Part):
    """SIGUSR1 and SIGUSR2 for the agent are forwarded to its workers.

    Torchrun dies of both, and its workers keep running in their own sessions. With
    ``--signals-to-handle`` it forwards them, but then ends the job.
    """

    NAME = "forward_signals"
    TARGET = "LocalElasticAgent._monitor_workers"
    REASON = "SIGUSR1 ends the agent and does not reach the workers (pytorch#154849)"
    USES = (("LocalElasticAgent.__init__", "_pcontext"),)

    @classmethod
    def fits(cls) -> bool:
        """Also check that the contexts have the workers' process numbers."""
        contexts = _torch.MultiprocessContext, _torch.SubprocessContext
        has_numbers = (takes(context, "pids", "self") for context in contexts)
        return super().fits() and all(has_numbers)

    class Extension(PartAgent):
        """The agent with this part."""

        def _monitor_workers(self, worker_group: Any) -> Any:
            if self._pcontext is not None:
                self._hpc.hooks.forward(self._pcontext.pids())
            return super()._monitor_workers(worker_group)


class WatchWorkers(Part):
    """A failed worker is noticed at once, together with its traceback.

    Torch's agent looks only every ``--monitor-interval``, and stops the other workers
    first. The worker's own text is lost in the output of all.
    """

    NAME = "watch_workers"
    TARGET = "SubprocessHandler._popen"
    REASON = (
        "the traceback of the first failure is lost (pytorch#113546, #75087, #60911)"
    )
    USES = (
        ("SubprocessHandler._popen", "_stderr"),
        ("LocalElasticAgent.__init__", "_pcontext"),
        ("SimpleElasticAgent.__init__", "_remaining_restarts"),
        ("PContext.__init__", "stderrs", "error_files"),
        ("RunResult.is_failed",),
    )

    @classmethod
    def start_worker(cls, original: Any, handler: Any, args: Any, env: Any) -> Any:
        """Read the worker's stderr, unless torch writes it to a file."""
        start_next = super().start_worker
        planned = handler._stderr
        is_hidden = getattr(planned, "name", "") == os.devnull  # --local-ranks-filter
        if planned is not None and not is_hidden:  # a file: --redirects, --tee
            return start_next(original, handler, args, env)

        def start(stderr: Any) -> Any:
            handler._stderr = planned if stderr is None else stderr
            try:
                return start_next(original, handler, args, env)
            finally:
                handler._stderr = planned

        return cls.hooks.relay.start(start, is_shown=not is_hidden)

    @classmethod
    def close_context(cls, original: Any, *args: Any, **options: Any) -> None:
        """Look for failures before torch ends the workers."""
        _examine(cls.hooks.watch)
        super().close_context(original, *args, **options)

    class Extension(PartAgent):
        """The agent with this part."""

        def _start_workers(self, worker_group: Any) -> dict[int, Any]:
            pids: dict[int, Any] = super()._start_workers(worker_group)
            workers = _workers(pids, worker_group, self._pcontext)
            self._hpc.hooks.watch.begin(workers, self._remaining_restarts)
            return pids

        def _monitor_workers(self, worker_group: Any) -> Any:
            self._hpc.hooks.watch.before_poll()
            result = super()._monitor_workers(worker_group)
            if not result.is_failed():
                self._hpc.hooks.watch.poll_was_clean()
            return result

        def _shutdown(self, *args: Any, **options: Any) -> None:
            is_signal = isinstance(sys.exc_info()[1], SignalException)
            self._hpc.hooks.watch.stopping(look=not is_signal)
            super()._shutdown(*args, **options)
            self._hpc.hooks.watch.all_stopped()


def _examine(watch: Watch) -> None:
    try:
        watch.before_stop()
    except SignalException:
        raise
    except Exception as error:  # noqa: BLE001 - the workers must be stopped
        _log.warning("the workers were not examined: %s", error)


def _workers(pids: dict[int, Any], group: Any, context: Any) -> list[Worker]:
    processes = _processes(context)
    return [
        Worker(
            rank=group.workers[local].global_rank,
            size=group.workers[local].world_size,
            node=group.group_rank,
            local_rank=local,
            pid=pid,
            exit_code=functools.partial(_exit_code, pid, processes.get(local)),
            log=_file(context.stderrs.get(local)),
            error_file=context.error_files.get(local, ""),
            nodes=group.group_world_size,
            told=getattr(processes.get(local), "told", lambda *_: b""),
        )
        for local, pid in pids.items()
    ]


def _file(name: str | None) -> str:
    return "" if name in (None, os.devnull) else str(name)


def _processes(context: Any) -> dict[int, Any]:
    if hasattr(context, "subprocess_handlers"):
        return {k: h.proc for k, h in context.subprocess_handlers.items()}
    processes = getattr(getattr(context, "_pc", None), "processes", ())  # functions
    return dict(enumerate(getattr(each, "_popen", None) for each in processes))


def _exit_code(pid: int, process: Any) -> int | None:
    collected = getattr(process, "returncode", None)
    return exit_code_of(pid) if collected is None else int(collected)


class DeferSignals(Part):
    """A death signal interrupts neither a start nor an end of workers.

    Torch's handler raises an exception, even in the at-fork hooks that a start of a
    worker runs: there Python ignores it. While workers write their checkpoints, a
    second signal would signal them again, and after one more the agent would end
    without them.
    """

    NAME = "defer_signals"
    TARGET = "_terminate_process_handler"
    REASON = (
        "a death signal is lost while a worker is started, and an agent signalled "
        "twice can leave workers behind (since pytorch#61602)"
    )
    USES = (("PContext.start", "_terminate_process_handler"),)

    @classmethod
    def fits(cls) -> bool:
        """Also check how workers are ended."""
        close = "self", "death_sig", "timeout"
        return super().fits() and takes(_torch.PContext, "close", *close)

    @classmethod
    def handle_signal(cls, original: Any, number: int, frame: Any) -> None:
        """Handle the signal when no step holds it."""
        cls.hooks.death_signals.handler(original)(number, frame)

    @classmethod
    def close_context(cls, original: Any, *args: Any, **options: Any) -> None:
        """Hold signals until the workers have ended."""
        with cls.hooks.death_signals.held(FOREVER):
            super().close_context(original, *args, **options)

    class Extension(PartAgent):
        """The agent with this part."""

        def _start_workers(self, worker_group: Any) -> Any:
            with self._hpc.hooks.death_signals.held(limits.SIGNAL_TIMEOUT):
                return super()._start_workers(worker_group)

        def _shutdown(self, *args: Any, **options: Any) -> None:
            if isinstance(sys.exc_info()[1], (SignalException, JobFailedError)):
                self._hpc.hooks.death_signals.end()
            super()._shutdown(*args, **options)
