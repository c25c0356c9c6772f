"""The rendezvous of nodes that the scheduler has already numbered.

PyTorch's own rendezvous needs no node ranks: all nodes change one text by
compare-and-set until it lists them all. Here every node connects to the coordinator,
which replies when all have connected. The same connection then carries restarts, the
end, and failures.

`protocol` has the messages. `coordinator` decides, without clock or network. Its parts
are `members` (the agents), `rounds`, `roster` (all nodes), `policy`, `phases`, `record`
and `key_value_store`. `server` serves it.

`client` is an agent's connection to it. `search` finds it at its expected address. With
spares, `member` and `peers` find the next one, or become it. `liveness` counts the
signs of life.

`connection` opens and closes all of these, in the thread of a `loop`. `notice` does so
for a node that cannot start. `handler` and `store` are for PyTorch's agent. Only they
import torch.
"""
