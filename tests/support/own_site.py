"""A site of one's own, for tests."""

from __future__ import annotations

# A site's variables in a worker.
VARIABLES = ("host", "MASTER_ADDR", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")

OWN = """
centre = "A centre of our own"

[ours]
title = "a cluster in a cellar"
source = "the administrator"
recognise = [{ variable = "OUR_CLUSTER", values = ["cellar"] }]

[ours.hosts]
pattern = '^(node[0-9]+)$'
replacement = '\\1-fast'
examples = { node1 = "node1-fast" }

[ours.variables]
NCCL_SOCKET_IFNAME = "enp"
NCCL_CROSS_NIC = "1"
"""
