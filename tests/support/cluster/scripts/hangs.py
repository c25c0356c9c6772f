"""The doctor, on a node that hangs as soon as it measures a pair.

hangs.py OPTIONS
"""

import os
import runpy
import signal
from unittest.mock import patch

from torchrun_hpc.doctor.link import Links

measure = Links.measure


def hang(*args, **options):
    """Stop this process. When it is continued, measure as usual."""
    hanging.stop()
    os.kill(os.getpid(), signal.SIGSTOP)
    return measure(*args, **options)


hanging = patch.object(Links, "measure", hang)
hanging.start()
runpy.run_module("torchrun_hpc.doctor", run_name="__main__", alter_sys=True)
