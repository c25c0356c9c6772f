"""What task 0 keeps of what the others reply."""

from __future__ import annotations

from types import SimpleNamespace

from doctor.reports import make_node

from torchrun_hpc.doctor.conductor import Conductor
from torchrun_hpc.doctor.launch import Ended
from torchrun_hpc.doctor.place import Wishes
from torchrun_hpc.doctor.results import Torch


def test_the_slowest_import_counts():
    """The second launch finds the files in memory."""
    here = SimpleNamespace(meeting=SimpleNamespace(nodes=1))
    conductor = Conductor(here, Wishes(), lambda _: None)
    conductor._found.nodes[0] = make_node(torch=None)
    for seconds, version in ((40.0, ""), (2.0, "2.13.0"), (3.0, "")):
        conductor._keep(0, Ended(1, torch=Torch(version, seconds)))
    assert conductor._found.nodes[0].torch == Torch("2.13.0", 40.0)
