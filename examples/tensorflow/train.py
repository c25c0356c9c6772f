"""Trains a small model with TensorFlow, on all nodes of the job.

srun --ntasks-per-node=1 python examples/tensorflow/train.py
"""

from __future__ import annotations

from tf_config import set_tf_config

set_tf_config()

import tensorflow as tf  # noqa: E402 - it reads TF_CONFIG

FEATURES = 16


def main() -> None:
    """Train, and print the loss."""
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    tf.random.set_seed(0)
    inputs = tf.random.normal((3200, FEATURES))
    targets = inputs @ tf.random.normal((FEATURES, 1))
    data = tf.data.Dataset.from_tensor_slices((inputs, targets)).batch(64).repeat()
    with strategy.scope():
        layers = [tf.keras.layers.Dense(64, "tanh"), tf.keras.layers.Dense(1)]
        model = tf.keras.Sequential(layers)
        model.compile(tf.keras.optimizers.SGD(0.05), "mse")
    model.fit(data, epochs=5, steps_per_epoch=50, verbose=2)


if __name__ == "__main__":
    main()
