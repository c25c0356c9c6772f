"""The rendezvous of nodes that the scheduler has already numbered.

PyTorch's own rendezvous needs no node ranks: all nodes change one text by
compare-and-set until it lists them all. Here every node connects to the coordinator,
which begins a round when all are ready. The same connection then carries restarts, the
end, and failures.

`protocol` has the messages, `messages` what users read of them. `coordinator` decides,
without clock or network. Its parts are `rounds`, `roster` (the nodes), `record` and
`key_value_store`. `server` serves it.

`client` is an agent's connection to it, and `member` what its node knows of the job.
`search` finds the coordinator at its expected address. With spares, `peers` find the
next one, or become it. `key` proves that both ends belong to the job.

`connection` opens and closes all of these, in the thread of a `loop`. `handler` is for
PyTorch's agent. Only it imports torch. `errors` are what ends a search or a round.
"""
