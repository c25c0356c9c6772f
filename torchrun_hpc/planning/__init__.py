"""The decisions about a launch: pure functions, without torch, input or output.

`mode` decides how the workers start. `plan` assembles the plan. Each mode has its own
module: `one_node`, `several_nodes`, `manual`, `direct`. They share the endpoint
(`endpoints`, `local_endpoint`), the variables of the network (`network_env`), CPUs and
GPUs (`resources`), and messages (`messages`).
"""
