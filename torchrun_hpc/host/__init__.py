"""Probes of this node: its network, CPUs and GPUs, name server, and processes.

No other room asks the system for them. They decide nothing.
"""
