"""Work until told to stop, or to fail; imports no torch.

    steady.py FOLDER

Writes FOLDER/upRANK.ATTEMPT when it is there, and where the store of its job is into
FOLDER/storeATTEMPT. Ends well when FOLDER/stop or FOLDER/stopRANK exists, and with exit
code 3 when FOLDER/failRANK.ATTEMPT does.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

folder = Path(sys.argv[1])
rank = os.environ["RANK"]
attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
if rank == "0":
    place = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    (folder / f"store{attempt}").write_text(place)
(folder / f"up{rank}.{attempt}").write_text(str(os.getpid()))
while not ((folder / "stop").exists() or (folder / f"stop{rank}").exists()):
    if (folder / f"fail{rank}.{attempt}").exists():
        sys.exit(3)
    time.sleep(0.05)
sys.stdout.write(f"steady: rank {rank}, attempt {attempt}\n")
