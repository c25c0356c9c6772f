"""torchrun for clusters: one command per job, everything else from the scheduler.

``import torchrun_hpc`` imports no torch and changes nothing. The command is
``python -m torchrun_hpc``; ``import torchrun_hpc.auto`` is for programs that call
``torch.distributed.run`` themselves.
"""

__version__ = "0.1.0"
__all__ = ["__version__"]
