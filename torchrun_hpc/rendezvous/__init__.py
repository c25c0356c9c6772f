"""The rendezvous of nodes that the scheduler has already numbered.

PyTorch's own rendezvous needs no node ranks: all nodes change one text by
compare-and-set until it lists them all. Here every node connects to the coordinator,
which begins a round when all are ready. The same connection then carries restarts, the
end, and failures.

`protocol` defines the messages between nodes, and `messages` the texts for users.
`coordinator` decides, without clock or network. Its parts are `rounds`, `roster` (the
nodes), `record` and `key_value_store`. `server` connects it to the agents.

`client` is an agent's connection to the coordinator. `member` is what its node knows of
the job. `search` finds the coordinator at its expected address. With spares, `peers`
find the next one, or become it. `key` proves that both ends belong to the job.

`connection` opens and closes all of these, in the thread of a `loop`. `handler` is for
PyTorch's agent. Only it imports torch. `errors` end a search or a round.
"""
