"""Tell TensorFlow the nodes of this job, by ``TF_CONFIG``.

For `tf.distribute.MultiWorkerMirroredStrategy`, which wants one process on each node
and uses all GPUs that it finds there. Call `set_tf_config` before TensorFlow is
imported:

    srun --ntasks-per-node=1 python examples/tensorflow/train.py
"""

from __future__ import annotations

import json
import os
from typing import Any

import torchrun_hpc


def tf_config(meeting: dict[str, Any]) -> dict[str, Any]:
    """Return the content of ``TF_CONFIG``: the nodes, and which of them this one is."""
    port = meeting["endpoint"].rpartition(":")[2]
    workers = [f"{host}:{port}" for host in meeting["fast_hosts"]]
    task = {"type": "worker", "index": meeting["node_rank"]}
    return {"cluster": {"worker": workers}, "task": task}


def set_tf_config() -> None:
    """Set ``TF_CONFIG``, which TensorFlow needs if there are several nodes.

    Raises:
        torchrun_hpc.LaunchError: The nodes are unknown.
    """
    meeting = torchrun_hpc.describe()["meeting"]
    if meeting["backend"] == "direct" or not all(meeting["hosts"]):
        raise SystemExit(
            "TensorFlow needs one process per node, and all nodes' names. In a Slurm "
            "job, start it with: srun --ntasks-per-node=1 python ..."
        )
    if meeting["nodes"] > 1:
        os.environ["TF_CONFIG"] = json.dumps(tf_config(meeting))


if __name__ == "__main__":
    set_tf_config()
    print(os.environ.get("TF_CONFIG", "one node: TensorFlow needs no TF_CONFIG"))
