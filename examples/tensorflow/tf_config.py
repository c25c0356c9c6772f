"""Tell TensorFlow the nodes of this job, by ``TF_CONFIG``.

For `tf.distribute.MultiWorkerMirroredStrategy`, which wants one process on each node
and uses all GPUs that it finds there. Call it before TensorFlow is imported:

    srun --ntasks-per-node=1 python examples/tensorflow/train.py
"""

from __future__ import annotations

import json
import os

import torchrun_hpc


def set_tf_config() -> None:
    """Set ``TF_CONFIG``, by the nodes' names on the fast network; on one node, nothing.

    Raises:
        torchrun_hpc.LaunchError: The nodes cannot be found out.
    """
    plan = torchrun_hpc.describe()["plan"]
    if plan["nodes"] == 1:
        return
    port = plan["endpoint"].rpartition(":")[2]
    workers = [f"{host}:{port}" for host in plan["fast_hosts"]]
    task = {"type": "worker", "index": plan["node_rank"]}
    os.environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": workers}, "task": task})


if __name__ == "__main__":
    set_tf_config()
    print(os.environ.get("TF_CONFIG", "one node: TensorFlow needs no TF_CONFIG"))
