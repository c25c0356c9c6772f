"""The stacks of a job's workers: ``python -m torchrun_hpc.stacks``.

    command ──socket──► agent ──rendezvous──► all agents ──py-spy──► workers

`sampling` gets the stack of each worker of a node from py-spy. `service` answers the
command on a socket that only the user can use. `tree` merges the stacks of all ranks.
`stall` reports stacks that no longer change.
"""
