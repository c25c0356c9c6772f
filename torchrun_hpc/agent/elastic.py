"""The elastic agent in this process, which starts and observes a node's workers."""

from __future__ import annotations

import contextlib
import copy
import os
import signal
import time
import traceback
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed import run as torch_run
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, record
from torch.distributed.elastic.rendezvous import RendezvousError
from torch.distributed.elastic.rendezvous import registry as backends

from torchrun_hpc import limits
from torchrun_hpc.agent import end, output, signals
from torchrun_hpc.agent.patches import Hooks, registry
from torchrun_hpc.agent.patches.agent import ForwardSignals, WatchWorkers
from torchrun_hpc.agent.signals import DeathSignals, interrupt_kills
from torchrun_hpc.agent.start import DryRunReplies, Starter
from torchrun_hpc.errors import FAILED, LaunchError, Message, Setting
from torchrun_hpc.failures import report
from torchrun_hpc.failures.relay import Relay
from torchrun_hpc.failures.report import LocalWorld
from torchrun_hpc.failures.watch import Watch
from torchrun_hpc.host import capabilities
from torchrun_hpc.host.resolver import Resolver
from torchrun_hpc.options import rdzv_conf, torchrun_parser
from torchrun_hpc.options.values import NONE, SCHEDULER
from torchrun_hpc.planning import resources
from torchrun_hpc.planning.plan import make_plan
from torchrun_hpc.preload.hidden import read_log_level
from torchrun_hpc.preload.starter import Preloaded
from torchrun_hpc.preload.worker import chosen_by_import
from torchrun_hpc.rendezvous.errors import JobFailedError
from torchrun_hpc.rendezvous.handler import (
    CoordinatorMissingError,
    SchedulerRendezvous,
    settings_of,
)
from torchrun_hpc.rendezvous.key import Key
from torchrun_hpc.reporting import console, description
from torchrun_hpc.reporting.console import is_reporter
from torchrun_hpc.reporting.start_line import joined_line
from torchrun_hpc.stacks.inspection import HANG, Inspection, NodeStacks, OtherNodes
from torchrun_hpc.variables import CPP_LOG_LEVEL, LOG_LEVEL, TORCH_LOGS

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torchrun_hpc.agent.end import World
    from torchrun_hpc.failures.failure import Failure
    from torchrun_hpc.failures.worker import Worker
    from torchrun_hpc.host.resolver import ResolverCheck
    from torchrun_hpc.options.options import Options
    from torchrun_hpc.planning.inputs import Inputs
    from torchrun_hpc.planning.meeting import Meeting
    from torchrun_hpc.planning.plan import LaunchPlan
    from torchrun_hpc.rendezvous.client import Client
    from torchrun_hpc.reporting.description import Description


_run = torch_run.run  # the original, which `torchrun_hpc.auto` replaces


class AgentStarter(Starter):
    """Hands over to torch's agent.

    `plan` fills in torchrun's `args`. `resolver` checks whether the resolver answers.
    If this process does nothing else (`is_command`), torch's own failure report is
    withheld, unless the user asked for torch's logs.
    """

    def __init__(
        self,
        inputs: Inputs,
        args: argparse.Namespace,
        *,
        preloaded: Preloaded | None = None,
        resolver: ResolverCheck | None = None,
        is_command: bool = False,
    ) -> None:
        super().__init__(inputs)
        self._args = copy.copy(args)  # a program may launch again with its own
        self._preloaded = preloaded or Preloaded()
        self._resolver = resolver
        self._is_command = is_command
        environ = inputs.environ
        has_logs = environ.get(TORCH_LOGS) or environ.get(LOG_LEVEL)
        self._is_quiet = is_command and not (has_logs or inputs.options.hpc_debug)
        self._observer: Observer
        self._death_signals = DeathSignals()
        self._outcomes: Sequence[registry.Outcome] = ()
        self._begins: float | None = time.monotonic()

    def plan(self, meeting: Meeting) -> LaunchPlan:
        """Plan with what torch finds on this node, and fill in torchrun's arguments.

        Raise `LaunchError` if an option or a variable cannot work.
        """
        inputs, args = self.inputs, self._args
        node = replace(
            inputs.node,
            workers=torchrun_parser.number_of_workers(
                inputs.options, args.nproc_per_node
            ),
            gpus=torchrun_parser.number_of_gpus(),
            of_release=capabilities.variables(),
            resolver=self._resolver.result() if self._resolver else Resolver.UNKNOWN,
            incompatible_patches=registry.incompatible(),
        )
        plan = make_plan(replace(inputs, node=node), meeting)
        for name, option in plan.options.items():
            setattr(args, name, option.value)
        torchrun_parser.check_options(args, plan.asked)
        registry.check_names(plan.asked)
        return plan

    @contextlib.contextmanager
    def ready(self, plan: LaunchPlan) -> Iterator[LaunchPlan]:
        """Let torch find our rendezvous, and end in the same way as all other nodes.

        Raise `LaunchError` for a wrong command line, or `SystemExit` if the job has
        failed.
        """
        args, environ = self._args, self.inputs.environ
        is_first = is_reporter(plan.meeting.report_rank)
        with interrupt_kills():
            problem = self._preloaded.check(environ, is_reporter=is_first)
        workers = plan.workers
        if problem and workers.preload:
            by_exec = replace(workers.preload, problem=problem)
            plan = replace(plan, workers=replace(workers, preload=by_exec))
        if CPP_LOG_LEVEL in plan.environment:
            read_log_level()  # of this process, which has imported torch
        try:
            with self._observing(plan) as hooks:
                self._outcomes = registry.apply_patches(plan, hooks)
                torchrun_parser.check_configuration(args, plan.asked, environ)
                yield plan
        except ChildFailedError as error:
            if self._is_quiet and self._observer.watch.failures:
                raise SystemExit(FAILED) from error
            raise
        except JobFailedError as error:  # in a dry run
            _fail(report.failed(error.failure, plan.meeting), error)
        except CoordinatorMissingError as error:
            _fail(error.message, error)
        except RendezvousError as error:
            cause = f": {error.__cause__}" if error.__cause__ else ""
            text = (
                f"the rendezvous at {args.rdzv_endpoint} failed or was lost. Look for "
                f"an earlier error on its host. {type(error).__name__}: {error}{cause}"
            )
            _fail(Message("HPC085", text), error)

    @contextlib.contextmanager
    def _observing(self, plan: LaunchPlan) -> Iterator[Hooks | None]:
        """Prepare to observe the workers; a dry run has none."""
        args, meeting = self._args, plan.meeting
        end.forget_outcome(plan)
        if plan.asked.hpc_dry_run:
            yield None
            return
        begun, make_world = partial(self._begun, plan), partial(self._world, plan)
        observer = self._observer = Observer(plan, begun, make_world)
        world, ours = observer.world, None
        if meeting.is_ours:
            args.rdzv_backend = SCHEDULER
        with end.together(
            plan, world, self._death_signals, is_command=self._is_command
        ):
            if not isinstance(world, LocalWorld):
                ours = world
                if meeting.in_process:
                    ours.connect()  # also reports failures before torch's rendezvous
            if plan.asked.hpc_debug:
                preload = plan.workers.preload or NONE
                console.write_text(f"{console.PREFIX}preload: {preload}")
            yield Hooks(
                forward=signals.forward,
                relay=observer.relay,
                watch=observer.watch,
                death_signals=self._death_signals,
                rendezvous=ours,
                fork=self._preloaded.fork,
            )

    def _begun(self, plan: LaunchPlan, workers: Sequence[Worker]) -> None:
        end.write_running(plan, workers)
        since, self._begins = self._begins, None
        meeting, first = plan.meeting, workers[0]
        if since is None or meeting.nodes == 1:
            return
        if is_reporter(meeting.report_rank):
            seconds = time.monotonic() - since
            console.write_text(joined_line(plan, first.nodes, first.size, seconds))

    def _world(self, plan: LaunchPlan, observer: Observer) -> World:
        args, meeting = self._args, plan.meeting
        if not meeting.has_coordinator:
            return LocalWorld(meeting, observer.explain)
        shutdown = args.monitor_interval + capabilities.shutdown_timeout(args)
        settings = settings_of(meeting, str(args.rdzv_id), plan.asked, shutdown)
        return SchedulerRendezvous(
            meeting,
            settings,
            self.inputs.environ,
            address=str(getattr(args, "local_addr", "")),
            replies=observer.stacks.replies,
            explain=observer.explain,
            end_workers=observer.end_workers,
        )

    def findings(self, plan: LaunchPlan) -> tuple[list[Message], list[Message]]:
        """Return what this torch cannot do: on this node, and on all nodes."""
        meeting, of_node = plan.meeting, []
        opens_store = meeting.listen is not None and not meeting.is_ours
        is_shared = meeting.nodes > 1 or meeting.may_grow
        if is_shared and opens_store and not capabilities.LISTENING_SOCKET.present:
            of_node.append(capabilities.warning_of_all_interfaces())
        shared = registry.left_out(self._outcomes)
        if not self._preloaded.server:  # forks do not import torch
            shared += resources.of_imports(self.inputs, plan.workers, chosen_by_import)
        preload, planned = plan.workers.preload, self.inputs.preload
        if preload and preload != planned and not preload.is_default:
            # A site's option concerns each of its jobs: one node reports it.
            is_explicit = "hpc_preload" in plan.asked
            message = preload.not_used(preload.problem)
            (of_node if is_explicit else shared).append(message)
        return of_node, shared

    def describe(self, plan: LaunchPlan) -> Description:
        """Describe what this node would do."""
        inputs, options = self.inputs, {**plan.asked.given, **plan.options}
        command = torchrun_parser.plain_command(self._args, options, inputs.environ)
        if plan.meeting.is_ours:
            file = plan.meeting.key
            key = Key(replace(file, may_make=False), plan.meeting.launch_id)
            key.attempt()
            setting = Setting(key.name, file.source or "default")
            plan = replace(plan, options={**plan.options, "hpc_key_file": setting})
        outcomes = self._outcomes or registry.planned(plan)
        described = [registry.described(outcome) for outcome in outcomes]
        return description.description(
            inputs.job, plan, torch.__version__, described, command
        )

    def answers(self, plan: LaunchPlan) -> DryRunReplies:
        """Meet the other nodes, and return what all nodes would do."""
        from torchrun_hpc.agent import dry_run  # noqa: PLC0415 - rarely needed

        run_id = str(self._args.rdzv_id)
        return dry_run.meet(run_id, plan, self.describe(plan), self.inputs.environ)

    def run(self, plan: LaunchPlan) -> None:
        """Hand over to torch."""
        names = [*plan.asked.signals_to_handle]
        if not registry.is_applied(self._outcomes, ForwardSignals):
            names += [number.name for number in signals.FORWARDED]
        signals.leave_to_torch(names)
        is_scheduled = self.inputs.job is not None
        signals.begin(scheduled=is_scheduled, fork_server=self._preloaded.server)
        has_report = registry.is_applied(self._outcomes, WatchWorkers)
        try:
            with (
                self._observer.at_work(),
                output.withhold(is_quiet=self._is_quiet and has_report),
                _backend_faults(self._args.rdzv_backend, plan.asked),
            ):
                record(_run)(self._args)
        finally:
            self._preloaded.end()


@contextlib.contextmanager
def _backend_faults(backend: str, asked: Options) -> Iterator[None]:
    """Turn a missing package, or a wrong ``--rdzv-conf``, into one message."""
    try:
        yield
    except ImportError as error:  # the backend's package is missing
        text = f"needs a package that is not installed: {error.name or error}"
        raise LaunchError("HPC017", f"--rdzv_backend={backend} {text}") from None
    except (ValueError, OverflowError) as error:
        code = backends.get_rendezvous_handler.__code__
        frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
        if "rdzv_conf" not in asked or all(
            frame.f_code is not code for frame in frames
        ):
            raise  # not raised when torch made the handler
        fault = f"--rdzv_backend={backend} cannot use it: {error}"
        conf = asked["rdzv_conf"]
        raise rdzv_conf.unusable(conf, fault, everywhere=False) from None


def _fail(message: Message, error: Exception) -> None:
    console.write(message, "error")
    raise SystemExit(FAILED) from error


# --- the view of the workers ----------------------------------------------------------


def ask_for_stacks(client: Client, what: str, timeout: float) -> dict[int, Any]:
    """Ask all agents for stacks, up to ``timeout`` seconds; return replies by node.

    Lost nodes, and nodes without workers, are not missed.
    """
    active, every = {*client.active}, {*range(client.request.nodes)}
    spares = every - active
    # A spare may just have replaced a node of the hang. The thread that reports a hang
    # also passes on questions to this node.
    others = every - {client.request.rank} if what == HANG else active

    def wait(replies: Callable[[], Mapping[int, Any]]) -> None:
        client.wait_for(lambda: others <= replies().keys(), timeout)

    return {node: [] for node in spares} | client.ask_all(what, wait)


class Observer:
    """Observes the workers of this node, and tells the `world` of failed ones.

    `begun` gets the workers of each attempt. `make_world` gets this observer.
    """

    def __init__(
        self,
        plan: LaunchPlan,
        begun: Callable[[Sequence[Worker]], object],
        make_world: Callable[[Observer], World],
    ) -> None:
        self.relay = Relay()
        self.watch = Watch(
            self.relay,
            on_begin=begun,
            # Both are made below, from this watch.
            on_failure=lambda *failed: self.world.worker_failed(*failed),  # noqa: PLW0108
            on_hang=lambda: self.stacks.sample_hang(),  # noqa: PLW0108
            hangs=lambda: self.world.hangs,
        )
        self.stacks = NodeStacks(self.watch)
        self.world = world = make_world(self)
        others = None
        if not isinstance(world, LocalWorld):
            ask_all = partial(ask_for_stacks, world.client)
            others = OtherNodes(ask_all, lambda: world.is_first, lambda: world.meeting)
        self._inspection = Inspection(plan, self.stacks, others)

    def explain(self, failure: Failure) -> tuple[Failure, Sequence[str]]:
        """Explain a failure if it is a hang; see `report.Explain`."""
        return self._inspection.explain(failure) if failure.is_hang else (failure, ())

    def end_workers(self) -> None:
        """Kill the workers of this node at once, which counts as no failure."""
        self.watch.stopping(look=False)
        for worker, _ in self.watch.workers:
            if worker.exit_code() is None:  # now: torch may have reaped it meanwhile
                with contextlib.suppress(OSError):  # each leads a session
                    os.killpg(worker.pid, signal.SIGKILL)

    @contextlib.contextmanager
    def at_work(self) -> Iterator[None]:
        """Observe them while torch's agent runs."""
        self._inspection.start()
        try:
            yield
        finally:
            self._inspection.close()
            self.watch.end()
            self.relay.close(limits.STDERR_TIMEOUT)
