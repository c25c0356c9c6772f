"""What the workers of a job are doing: ``python -m torchrun_hpc.stacks``.

    command ──socket──► agent ──rendezvous──► all agents ──py-spy──► workers

`sampling` asks py-spy for the stack of each worker of a node. `service` answers the
command, on a socket of the user's own. `tree` merges the stacks of all ranks.
`stall` reports when they do not change any more.
"""
