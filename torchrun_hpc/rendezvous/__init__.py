"""A rendezvous for nodes that the scheduler has already numbered.

Torch's own lets all nodes fight over one text by compare-and-set, to find out how many
they are and who is who. Under a scheduler every node knows that: each says hello to one
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
