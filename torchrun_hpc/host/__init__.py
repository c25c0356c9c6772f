"""Probes of this node: its network, CPUs and GPUs, name server, and processes.

Only this folder asks the system for these facts. It decides nothing.
"""
