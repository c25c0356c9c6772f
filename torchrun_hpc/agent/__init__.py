"""The start and the end of a launch: nothing of the plan is decided here.

`start` is the last stage in all modes. It uses a `Starter`: the one of `elastic` runs
torch's agent in this process, the one of `direct` turns it into the script. `patches`
changes torch's agent. `abort` gives up before the start, `end` ends a launch.
"""
