"""The stacks and collectives of a job's workers: ``python -m torchrun_hpc.stacks``.

    command ──socket──► agent ──rendezvous──► all agents ──► forks or py-spy ► workers

`sampling` gets the stack of each worker of a node: from the fork itself, from py-spy,
or from an ended worker's traceback. `calls` are the latest collectives of a rank, from
the fork or from a file that torch writes. `collectives` compares those of all ranks,
and merges their stacks. `inspection` asks all nodes: for the command, after a hang, and
for a report of stacks that no longer change. `service` is the command's socket, which
only the user can use.
"""
