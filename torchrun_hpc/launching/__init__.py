"""Start of the workers: nothing is decided here.

`start` is the last stage in all modes. It uses a `Starter` from `agent` or `direct`,
which also makes the plan.
"""
