"""The rendezvous of nodes that the scheduler has already numbered.

PyTorch's own rendezvous needs no node ranks: all nodes change one text by
compare-and-set until it lists them all. Under a scheduler, every node knows its rank.
It connects to the coordinator, which replies when all have connected. The same
connection then carries restarts, the end, and failures.

=================  ===================================================================
`protocol`         the messages between agents and coordinator
`coordinator`      the decisions: a state machine without clock or network. Its parts:
`phases`           its phases, and which may follow which
`members`          the agents: admission, heartbeats, candidates
`rounds`           the rounds: when each begins and ends
`roster`           all nodes: who is ready, lost or excluded, or may have workers
`policy`           who is active in the next round: pure functions
`record`           what all nodes know of the job
`member`           what one node knows, and which coordinator it follows
`key_value_store`  the values that PyTorch's agents share
`loop`             the thread of a process for all of this
`server`           serves the coordinator, and any node that may become it
`client`           an agent's connection to the coordinator
`errors`           why a node cannot take part
`search`           finds the coordinator at its expected address
`peers`            finds the coordinator, or becomes it, in a job with spares
`liveness`         the coordinator's signs of life
`questions`        an agent's questions to the store and to all other agents
`connection`       all of these, opened and closed for a node
`notice`           the same for a node that cannot start
`health`           the health check of a node with spares
`messages`         the messages to the user
`handler`          the interface for PyTorch's agent; imports torch
`store`            the store for PyTorch's agents; imports torch
=================  ===================================================================
"""
