"""The decisions about a launch: pure functions, without torch, input or output.

`mode` decides how the workers start; each mode has its own module. `plan` assembles the
plan.
"""
