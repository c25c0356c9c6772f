"""Probes of this node: its network, CPUs and GPUs, name server, and processes."""
