"""Failures of workers: their last words, which one was first, and the report.

    worker ──stderr──► `relay` ──► stderr of the agent
                          │
       exit code ──► `watch` ──► `failure.Collection` ──► `report`

`worker` describes how a worker failed, with the `last_words` in its stderr. In our
rendezvous, the coordinator has the collection, and its node reports. Otherwise each
agent reports its own workers.
"""
