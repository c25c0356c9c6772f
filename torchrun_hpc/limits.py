"""All time limits and intervals of the launcher, in seconds.

The form is: a comment, then ``NAME = number``. The comment says what the limit is for,
and why it is so long. Its last sentence begins with "At its end,", and says what then
happens. A heading names the room. Modules read a limit through this module, so that a
test can change it here, unless it is the default of a parameter.

Elsewhere are: limits that are an option's default, and those of `programs`, which
import nothing. ``docs/write_constants.py`` writes the table in ``docs/internals.md``.
"""

from __future__ import annotations

# --- Waits and their reports ----------------------------------------------------------

# The first report of a wait. Most waits are over before. At its end, the node that
# reports for all prints a note.
FIRST_REPORT = 10
# The interval of further reports. At its end, the note is printed again.
NEXT_REPORT = 30
# The first report on nodes that do not report for all, because the reporting node may
# be lost. At its end, such a node also prints a note.
FIRST_REPORT_OF_OTHERS = 60
# The pause between two checks of a condition. Python handles signals after it. At its
# end, the condition is checked again.
WAIT_PAUSE = 0.05
# The first pause between attempts to connect: all nodes start together. At its end, the
# next attempt begins.
SHORTEST_BACKOFF = 0.05
# The longest pause between attempts to connect, which spares the head node. At its end,
# the next attempt begins.
LONGEST_BACKOFF = 1.0

# --- Host -----------------------------------------------------------------------------

# An answer of the resolver, which usually takes milliseconds. At its end, the name
# server counts as silent, and PyTorch's warnings about it are left out.
RESOLVER_TIMEOUT = 0.5
# An answer of each name server, for which a task in direct mode must wait. At its end,
# the next name server is asked.
NAME_SERVER_TIMEOUT = 0.1
# Another process has bound a socket, and listens a moment later. At its end, that
# process counts as absent.
LISTEN_TIMEOUT = 0.2

# --- Schedulers -----------------------------------------------------------------------

# An answer of the process manager (PMI). The barrier has no such limit: it waits for
# the slowest task. At its end, the connection counts as dead, and nothing is exchanged.
PMI_TIMEOUT = 30.0

# --- The start ------------------------------------------------------------------------

# All tasks must start, and all nodes must join. PyTorch's 600 s are too few if hundreds
# of nodes pull a container, or import from a busy file system. At its end, the job
# fails.
JOIN_TIMEOUT = 900
# An answer of PyTorch's own rendezvous. PyTorch's 60 s are too few for a busy file
# system on hundreds of nodes. At its end, the job fails.
READ_TIMEOUT = 600
# Node 0 of a dry run waits for the other nodes, unless --rdzv-conf has a join_timeout.
# At its end, the dry run shows the nodes that have answered.
DRY_RUN_TIMEOUT = 60
# The silence of an agent, unless --rdzv-conf sets it. A busy node may be silent for a
# while. At its end, the agent counts as lost.
SILENCE_LIMIT = 120
# The shortest silence that --rdzv-conf can set: heartbeats are this far apart. At its
# end, the agent counts as lost.
LEAST_SILENCE = 5

# --- Reporting ------------------------------------------------------------------------

# A write to a slow reader. Training must not wait for it. At its end, the rest of the
# text is lost.
WRITE_TIMEOUT = 1.0

# --- Failures -------------------------------------------------------------------------

# The longest time between two looks at the workers: old kernels do not report their
# ends. At its end, the next look begins.
WATCH_INTERVAL = 0.1
# The shortest time between two looks: a worker has ended, but its exit code is not
# known yet. At its end, the next look begins.
WATCH_PAUSE = 0.005
# A worker that has written a traceback usually ends sooner. At its end, the worker's
# exit is no failure if the agent stops all workers.
TEARDOWN_TIMEOUT = 5.0
# The rest of a long line, which follows soon. At its end, other workers may write into
# the line.
LINE_TIMEOUT = 0.1
# The time until a thread sees what other threads have read. At its end, the thread
# looks again.
RELAY_INTERVAL = 0.2
# The rest of the workers' stderr, when the agent ends. At its end, a separate process
# passes on later text.
STDERR_TIMEOUT = 1.0
# Equal failures of other workers come almost together. At its end, the first failure is
# reported.
COLLECT_TIMEOUT = 1.0
# The cause of a doubtful failure comes later. At its end, the failure is reported.
COLLECT_CAUSE_TIMEOUT = 2.0

# --- Stacks ---------------------------------------------------------------------------

# The stacks of one node, as a part of `STACKS_TIMEOUT`. At its end, the agent stops
# py-spy, and takes the other stacks.
NODE_STACKS_TIMEOUT = 3.0
# The stacks of all nodes: people wait for less than 5 s. At its end, the stacks of the
# other nodes are missing.
STACKS_TIMEOUT = 4.5
# The stacks of one node in a hang, as a part of `HANG_TIMEOUT`. At its end, the agent
# stops py-spy.
HANG_NODE_TIMEOUT = 2.0
# The same, with the wait for workers that are about to end. At its end, they count as
# running.
HANG_END_TIMEOUT = 2.9
# The stacks of all nodes in a hang. At its end, the stacks of the other nodes are
# missing.
HANG_TIMEOUT = 3.0
# An answer of a fork, which usually takes some milliseconds. At its end, the fork
# counts as busy, and py-spy reads its stack.
FORK_ANSWER_TIMEOUT = 0.5
# The least time for py-spy, also after the node's limit, and after a kill. At its end,
# the worker has no stack.
PY_SPY_TIMEOUT = 0.02
# An answer to the command, for which the agent may wait 5 s for other nodes. At its
# end, the command says that the agent did not answer.
STACKS_COMMAND_TIMEOUT = 30.0
# A command must read its answer, because the next command waits. At its end, the
# connection is closed.
STACKS_READ_TIMEOUT = 10.0
# The pause after an error, for example too many open files. At its end, the agent
# listens again.
STACKS_PAUSE = 0.1
# The default of --hpc-stall-report with preloading. Some steps take many minutes. At
# its end, all stacks are printed once.
STALL_TIMEOUT = 1800
# The shortest time between two looks for a stall. At its end, the next look begins.
SHORTEST_STALL_INTERVAL = 0.5
# The longest time between two looks for a stall. At its end, the next look begins.
LONGEST_STALL_INTERVAL = 30.0

# --- Preloading -----------------------------------------------------------------------

# A fork that tries OpenMP, which can hang. At its end, the workers are not forked.
FORK_TRIAL_TIMEOUT = 5
# The end of the fork server, after its connection. At its end, the agent continues
# without it.
FORK_SERVER_TIMEOUT = 1.0
# The pause between two looks at a fork that must end. At its end, the next look begins.
FORK_PAUSE = 0.01
# The first page of a library. A cached page, or one on a fast local disk, takes less.
# At its end, the file system counts as slow, and files are read ahead.
PAGE_TIMEOUT = 0.0005

# --- The rendezvous: agents -----------------------------------------------------------

# A connection to a port of the coordinator. At its end, the next attempt begins.
CONNECT_TIMEOUT = 10.0
# An answer of the coordinator, which may have thousands of agents to answer. At its
# end, the next attempt begins.
WELCOME_TIMEOUT = 30.0
# The head node may take another port than the first one. At its end, the next port is
# also tried.
PORT_DELAY = 0.5
# A file server recovers, or another node's new key file becomes visible, because NFS
# caches its absence. At its end, the key counts as absent or wrong.
KEY_FILE_TIMEOUT = 10.0
# The check which program has a port. At its end, the message does not name the program.
PORT_CHECK_TIMEOUT = 2
# The coordinator gives up before the others, so that it reports. At its end, an agent
# gives up without a report.
SILENCE_HEAD_START = 10
# The coordinator decides the first failure. At its end, the agent leaves without it.
DECISION_TIMEOUT = 3.0
# The coordinator's node reports the failures, before the launcher ends all tasks. At
# its end, the agent leaves.
REPORT_TIMEOUT = 6.0
# The end of the connection to the coordinator. At its end, the agent aborts it.
LEAVE_TIMEOUT = 1.0
# A signal just before a wait for a lock is handled only after the wait. At its end, the
# wait continues.
CLIENT_SIGNAL_TIMEOUT = 0.5
# The end of the thread of the rendezvous. Calls aside have twice the time. Signals wait
# for it. At its end, the thread is left behind.
LOOP_END_TIMEOUT = 0.5
# The time between two looks at the clock. At its end, silence is counted.
TICK = 1.0

# --- The rendezvous: the coordinator --------------------------------------------------

# The time until a silent agent or coordinator is reported. At its end, a note names it.
SILENCE_REPORT = 30
# The interval of heartbeats, or a third of the silence limit if that is shorter. At its
# end, the next heartbeat is sent.
HEARTBEAT_INTERVAL = 5
# The first of two agents with the same node rank must answer. At its end, the second
# one replaces it.
CANDIDATE_TIMEOUT = 10
# A launcher that loses an agent sends SIGTERM to the others about now. At its end,
# signal and loss count as independent.
LOSS_TO_TERM = 2
# Other workers may report an earlier failure. At its end, the restart is reported.
RESTART_REPORT = 2
# The confirmation of a round by its agents. At its end, the round is sent again.
CONFIRM_INTERVAL = 5
# A caller must send its join request. At its end, the connection is aborted.
JOIN_REQUEST_TIMEOUT = 30.0
# The other agents must learn how the job ended. At its end, the coordinator closes.
CLOSE_TIMEOUT = 5.0
# The same for nodes that connect after the job has failed. At its end, the coordinator
# closes.
LATE_NODES_TIMEOUT = 30.0
# The rest that a closing coordinator must send. At its end, the rest is lost.
SEND_TIMEOUT = 0.5
# The main thread acts on a signal only after a wait. At its end, the wait continues.
SERVER_SIGNAL_TIMEOUT = 0.5
# An answer of an asked member. At its end, the member counts as absent.
PEER_TIMEOUT = 3.0
# The pause before all members are asked again. At its end, they are asked again.
PEERS_PAUSE = 0.2
# A process notices the end of its lease a moment later. At its end, the process counts
# as suspended.
SUSPENSION = 2

# --- The rendezvous: workers ----------------------------------------------------------

# An agent notices that its workers must end, and kills them. PyTorch's shutdown timeout
# is added. At its end, the other agents no longer wait.
KILL_MARGIN = 10
# PyTorch may still open the workers' store when the agent ends. At its end, a note
# explains the wait.
WORKERS_STORE_TIMEOUT = 5
# A key of the agents' store, as in PyTorch. At its end, PyTorch raises an error, and
# the agent gives up.
STORE_TIMEOUT = 300
# The end of a killed health check, which the kernel may keep. At its end, the check is
# left behind.
HEALTH_CHECK_KILL_TIMEOUT = 5

# --- The agent ------------------------------------------------------------------------

# A node that cannot start tells the others, which may start much later. At its end, the
# node ends without that.
FAULT_TIMEOUT = 120.0
# The same for faults that all nodes may have, because the others then also end. At its
# end, the node ends without that.
SHARED_FAULT_TIMEOUT = 30.0
# The search for a coordinator. Users must not wait longer for the reason. At its end,
# the node prints the reason in any case.
FAULT_REPORT = 5
# The time by which the reporting task ends first. mpirun, and srun with
# --kill-on-bad-exit, end all tasks together with the first one. At its end, the other
# tasks end.
TASK_HEAD_START = 2.0
# An agent that gives up tries to reach the others. At its end, it ends without that.
AGENT_REPORT_TIMEOUT = 10.0
# A start of workers holds a death signal, so that it leaves none behind. At its end,
# the signal acts. A signal without effect is then sent again.
SIGNAL_TIMEOUT = 1.0
# A scheduler signals all processes of a task. At its end, the agent passes the signal
# on to workers that do not have it.
SIGNALS_TOGETHER = 0.2
# One attempt to connect to the host of PyTorch's store. At its end, the next attempt
# begins.
STORE_PROBE_TIMEOUT = 5.0
# The store's host waits for the other nodes to leave. At its end, it exits, and other
# nodes may print errors.
HOST_EXIT_TIMEOUT = 5.0

# --- The doctor -----------------------------------------------------------------------

# The default of the doctor's --timeout, for other nodes and for progress. The
# tasks of a step start almost together. At its end, absent nodes are reported.
DOCTOR_TIMEOUT = 60.0
# The shortest --timeout: nodes examine themselves before they meet. At its end, the
# other nodes are reported as absent.
LEAST_DOCTOR_TIMEOUT = 10
# The wait for tasks to join, and for a silent task if the coordinator is on task 0:
# task 0 limits each wait itself. At its end, the task counts as lost.
EXAMINATION_TIMEOUT = 3600
# The silence of a task or of a coordinator elsewhere, if --timeout is not longer. At
# its end, the silent side counts as lost.
DOCTOR_SILENCE_LIMIT = 15
# The answers of file systems, name servers and drivers, which can hang. At its end, the
# node's record lacks them.
PROBES_TIMEOUT = 5.0
# An answer of an absent node's network. At its end, the node counts as unreachable.
ABSENT_NODE_TIMEOUT = 2.0
# A pair that measures. One of its nodes can wait for the other. At its end, a node
# without a reply counts as hung.
PAIR_TIMEOUT = 20.0
# A connection to the other node of a pair, and then its proof. At its end, the link
# counts as blocked.
LINK_OPEN_TIMEOUT = 2.0
# The connection from the other node, which is asked at the same time. At its end, the
# pair has no figures.
PARTNER_TIMEOUT = 10.0
# The next message or data of a pair. At its end, the pair has no figures.
LINK_MESSAGE_TIMEOUT = 3.0
# The first byte of many, which TCP has then sent four times. At its end, packets of the
# MTU's size count as lost.
FIRST_BYTE_TIMEOUT = 2.0
# Small messages between a pair: enough for a percentile. At its end, the latency is
# known.
PING_TIME = 0.1
# Data in one direction of a pair, much longer than TCP's slow start. At its end, the
# bandwidth is known.
SEND_TIME = 0.15
# The import of torch and the start of the workers, in addition to the collectives. Both
# are slow on a busy file system. At its end, the doctor stops the launcher.
LAUNCH_START_TIMEOUT = 120.0
# A stopped launcher must end its workers, or the kernel a killed launcher. At its end,
# the launcher is killed, or left behind.
LAUNCH_END_TIMEOUT = 15.0
# The same if the doctor itself ends, because a user waits. At its end, the launcher is
# killed, or left behind.
LAUNCH_ABORT_TIMEOUT = 0.5
# All tasks of a launch must reply. This is longer than the start and both ends, and is
# added to the time for the collectives. At its end, nodes without a reply count as
# hung.
LAUNCH_MARGIN = 160.0
# A failed launch ends on all nodes, and then after the doctor has stopped it. At its
# end, the doctor stops it, or nodes without a reply count as hung.
FAILED_LAUNCH_TIMEOUT = 20.0
# The repetitions of an operation or a product: noise is short. At its end, the next one
# begins.
REPEAT_TIME = 0.1
# One operation. Larger sizes would take still longer. At its end, they are left out.
SLOW_OPERATION = 1.0
# The threads of gloo release the last tensor a moment after its result is there. If the
# group is destroyed by then, a worker can hang (up to torch 2.4) or abort (2.13). At
# its end, the group is destroyed.
GLOO_PAUSE = 0.2
