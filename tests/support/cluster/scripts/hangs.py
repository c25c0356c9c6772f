"""The doctor, on a node that hangs as soon as it measures a pair.

hangs.py OPTIONS
"""

import os
import runpy
import signal

from torchrun_hpc.doctor import link

measure = link.Links.measure


def hang(*args, **options):
    """Stop this process; go on as usual when it is continued."""
    link.Links.measure = measure
    os.kill(os.getpid(), signal.SIGSTOP)
    return measure(*args, **options)


link.Links.measure = hang
runpy.run_module("torchrun_hpc.doctor", run_name="__main__", alter_sys=True)
