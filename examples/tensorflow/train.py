"""Trains a small model with TensorFlow, on all nodes of the job.

    srun --ntasks-per-node=1 python examples/tensorflow/train.py

Tried with TensorFlow 2.21, whose Keras has no training on several nodes.
"""

from __future__ import annotations

from tf_config import set_tf_config

set_tf_config()

import tensorflow as tf  # noqa: E402 - it reads TF_CONFIG

FEATURES = 16


def main() -> None:
    """Train, and print the loss, on each node."""
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    tf.random.set_seed(0)
    inputs = tf.random.normal((3200, FEATURES))
    targets = inputs @ tf.random.normal((FEATURES, 1))
    data = tf.data.Dataset.from_tensor_slices((inputs, targets)).batch(64)
    with strategy.scope():
        weights = tf.Variable(tf.zeros((FEATURES, 1)))

    @tf.function
    def step(inputs: tf.Tensor, targets: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((inputs @ weights - targets) ** 2)
        everywhere = tf.distribute.get_replica_context()
        gradient = everywhere.all_reduce("MEAN", tape.gradient(loss, weights))
        weights.assign_sub(0.01 * gradient)
        return loss

    for epoch in range(5):
        for batch in strategy.experimental_distribute_dataset(data):
            loss = strategy.reduce("MEAN", strategy.run(step, batch), axis=None)
        replicas = strategy.num_replicas_in_sync
        print(f"epoch {epoch}: loss {loss:.4f}, {replicas} replicas")


if __name__ == "__main__":
    main()
