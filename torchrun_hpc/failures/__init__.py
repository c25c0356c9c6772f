"""Why workers fail: what they wrote last, which of them was first, and the report.

    worker ──stderr──► `relay` ──► stderr of the agent
                          │
       exit code ──► `watch` ──► `collection` ──► `report`

=============  =====================================================================
`relay`        passes on what workers write to stderr, and keeps the end of it
`last_words`   finds the traceback in that end
`worker`       a worker of this node, and how it has failed
`watch`        finds out which workers have failed, and which of them first
`failure`      the record of a failure: of a worker, of a node, of a job
`collection`   which failure was the first, and which others are equal
`report`       what a person reads: a sentence, and a report on one screen
`local`        what a node reports if torch's own rendezvous serves it
=============  =====================================================================

If the nodes meet by our rendezvous, the coordinator has the collection, and node 0
reports. Otherwise each agent reports for its own workers.
"""
