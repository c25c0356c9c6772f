"""Start of the workers: nothing is decided here.

`inputs` collects the input of a plan. `start` is the last stage, the same in all modes.
It uses a `Starter` from `agent` or `direct`, which also makes the plan. Only
`environment` writes ``os.environ``. `abort` reports a fault to the other nodes,
`exit_status` the end.
"""
