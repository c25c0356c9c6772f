"""What is decided about a launch: pure functions, without torch, input or output.

`mode` decides how the workers are started. `plan` puts the plan together, for each mode
in a file of its own: `one_node`, `several_nodes`, `as_typed`, `direct`. They share
where the nodes meet (`endpoints`, `local_endpoint`), the variables of the network
(`network_env`), CPUs and GPUs (`resources`), and what a person reads (`messages`).
"""
