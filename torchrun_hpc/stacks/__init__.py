"""The stacks and collectives of a job's workers: ``python -m torchrun_hpc.stacks``.

    command ──socket──► agent ──rendezvous──► all agents ──► forks or py-spy ► workers

`sampling` gets the stack of each worker of a node: from the fork itself, from py-spy,
or from an ended worker's traceback. `calls` are the latest collectives of a rank, and
`dumps` the files that torch writes about them. `collectives` compares those of all
ranks, and `tree` merges their stacks. `inspection` answers for a node, also after a
hang. `service` answers the command on a socket that only the user can use. `stall`
reports stacks that no longer change.
"""
