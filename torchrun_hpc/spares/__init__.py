"""Spares: nodes that wait, so that a job outlives those that it loses.

A *member* is a node that the launcher was started on, by its number in the step. N of
them are active, each with a node rank; the others are spares, and wait. Any member may
be lost, the one that has the coordinator, too. All know the order of the members, and
where each can be asked; so the first one that is left becomes the coordinator, and the
round is formed anew, with a spare in the place of each member that is lost.

That there are never two worlds follows from four rules:

1. A round begins only when all N active members have confirmed it. Of two sets of N
   members out of fewer than 2 N, one member is in both.
2. A member confirms for one coordinator at a time, and no term below the last one.
3. A member that has lost its coordinator ends its workers, and says that it has.
4. A coordinator begins a round only when each active member of the round before has
   said so, or its process is gone, or so much time has passed that it must have.

=================  ===================================================================
`record`           what all members know of the job; who takes whose place
`coordinator`      the coordinator's state machine, with members in place of nodes
`standby`          what a member answers that is not the coordinator
`member`           what a member knows, and whom it follows: without clock or network
=================  ===================================================================
"""
