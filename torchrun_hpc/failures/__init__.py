"""Failures of workers: their last words, which one was first, and the report.

    worker ──stderr──► `relay` ──► stderr of the agent
                          │
       exit code ──► `watch` ──► `collection` ──► `report`

=============  =====================================================================
`relay`        passes on the workers' stderr, and keeps the end of it
`last_words`   finds the traceback in that end
`worker`       a worker of this node, and how it failed
`watch`        finds out which workers failed, and which was first
`failure`      the record of a failure: of a worker, a node, or a job
`collection`   picks the first failure, and groups equal ones
`report`       the text for the user: a sentence, and a report on one screen
`local`        the failures of a node that torch's own rendezvous serves
=============  =====================================================================

In our rendezvous, the coordinator has the collection, and node 0 reports. Otherwise
each agent reports its own workers.
"""
