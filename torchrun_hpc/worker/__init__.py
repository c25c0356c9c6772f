"""What runs in, or for, the process of a worker.

With ``--hpc-preload`` a fork server (`fork_server`) starts the workers: a process that
has split off from the agent right after the import. `requests` is what the agent tells
it, and hears from it; `script` is what a worker does in the place of exec.
"""
