"""A rendezvous for nodes that the scheduler has already numbered.

With torch's own, all nodes change one text by compare-and-set until it has the address
and the rank of each. Under a scheduler every node knows its rank: each connects to one
of them, the head, and is told when all are there. The same connection then carries
whatever concerns all: a restart, the end, a failure.

==============  ======================================================================
`protocol`      what agents say to each other
`meeting`       what the head decides: a state machine, without clock or network
`head`          the head's server
`member`        an agent's connection to the head, in a thread of its own
`handler`       what torch's agent sees of all that; the only room that knows torch
==============  ======================================================================
"""
