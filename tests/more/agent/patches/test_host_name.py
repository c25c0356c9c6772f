"""The agent asks no name server for the name of its host."""

from __future__ import annotations

from tests.support.processes import run_python
from tests.support.stock.inside_torch import needs
from tests.support.stock.side_by_side import OURS, STOCK, bare
from torchrun_hpc.agent.patches.torchrun import HostName
from torchrun_hpc.host import capabilities

ASKED = """
import socket, sys
real = socket.getfqdn
def getfqdn(*args):
    print("asked", file=sys.stderr)
    return real(*args)
socket.getfqdn = getfqdn
from {module} import main
main(sys.argv[1:])
"""


@needs(HostName.IS_FOR, "name of its own: it needs the host's as an address")
def test_no_name_server_is_asked(tmp_path):
    (tmp_path / "train.py").touch()
    asked = {}
    for which, module in (
        (OURS, "torchrun_hpc.main"),
        (STOCK, "torch.distributed.run"),
    ):
        program = ASKED.format(module=module)
        options = ["--nproc-per-node=2", "--local-addr=127.0.0.1", *bare(which)]
        done = run_python("-c", program, *options, "train.py", cwd=tmp_path)
        assert done.code == 0, done.err
        asked[which] = done.err.splitlines().count("asked")
    # Once for an address, which is put right afterwards.
    assert asked[OURS] == capabilities.ADDRESS_IS_LOST.present
    assert asked[STOCK] >= 2 + 2  # and once for each worker
