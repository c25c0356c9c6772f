"""A rendezvous for nodes that the scheduler has already numbered.

With torch's own, all nodes change one text by compare-and-set until it has the address
and the rank of each. Under a scheduler every node knows its rank: each connects to the
coordinator, which runs on one of them, and is informed when all have connected. The
same connection then carries what concerns all: a restart, the end, a failure.

=================  ===================================================================
`protocol`         the messages between agents and coordinator
`coordinator`      what the coordinator decides: a state machine, without clock or
                   network. It is made of:
`phases`           its phases, and which may follow which
`members`          the agents: admission, heartbeats, candidates
`rounds`           the rounds: when one begins, and when it ends
`roster`           all nodes: who is ready, lost or out, and may still have workers
`policy`           who is active in the next round: pure functions
`record`           what all nodes know of the job, and `member` what one makes of it
`key_value_store`  the values that torch's agents share, as the coordinator keeps them
`loop`             the thread in which a process takes part, with what follows
`server`           serves the coordinator, and whoever may become it
`client`           an agent's connection to the coordinator
`errors`           why a node cannot take part, or not any more
`search`           finds the coordinator where that should be
`peers`            finds the coordinator, or becomes it, in a job with spares
`liveness`         signs of life of the coordinator
`questions`        what an agent asks: the store, and all other agents
`connection`       all of these, as a node opens and closes them
`notice`           the same of a node that cannot start
`health`           the health check of a node with spares
`messages`         what the user reads about it
`handler`          what torch's agent asks; it imports torch, and so does
`store`            the store that torch's agents share
=================  ===================================================================
"""
