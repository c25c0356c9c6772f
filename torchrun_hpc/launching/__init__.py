"""Starting the workers: all that is done, and nothing that is decided.

`inputs` collects what a plan is made from. `start` is the last stage, the same in all
modes, with a `Starter` in `agent` or `direct`, which also makes the plan.
`environment` is the one place that writes ``os.environ``. `abort` tells the other nodes
of a fault, `exit_status` of the end.
"""
