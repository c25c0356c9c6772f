"""Write messages.md from the data in the package: ``python docs/write_messages.py``."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from torchrun_hpc.explain import parts

FILE = Path(__file__).with_name("messages.md")

HEAD = """# Messages by code

<!-- Written by docs/write_messages.py from torchrun_hpc/messages.toml. Do not edit. -->

The launcher prints each message on stderr, in one line with a code. If the message
suggests a command, the command follows on a line of its own:

```text
torchrun_hpc: error[HPC061]: this is the batch script of a job of 8 nodes, ...
    srun --nodes=8 --ntasks=8 --ntasks-per-node=1 python -m torchrun_hpc train.py
torchrun_hpc: warning[HPC092]: 4 workers share 2 CPUs ...
torchrun_hpc: note[HPC114]: 3 of 4 nodes have joined after 30 s ...
```

An **error** ends the launch. After a **warning**, the launch continues. A **note**
reports a wait, a restart, or a corrected value. The launcher's start line contains some
of the notes, each after a semicolon.

If all nodes find the same fault, only one node reports it. If only one node finds a
fault, the message contains the node's name. A node that cannot start tries for up to
two minutes to send the reason to the head node. All nodes then end, and the head node's
last line names the first failure (HPC125). A node cannot send the reason if it does not
know the head node, or if the nodes use PyTorch's own rendezvous. In these cases, the
other nodes wait for the missing node (HPC084, HPC114).

| exit code | meaning |
|---|---|
| 2 | wrong use: any error on this page, except those in the next row |
| 1 | the job failed (HPC125, HPC127), or the rendezvous failed (HPC085, HPC112) |
| other | the exit code that torchrun would return |

This page shows shortened messages. Words in capitals, such as NODE, stand for values.
On a cluster without internet, `python -m torchrun_hpc.explain HPC125` prints the same.
"""


def text() -> str:
    """Return the whole page."""
    written = HEAD
    for title, part in parts().items():
        codes = dict(part)
        intro = _unwrapped(codes.pop("intro", ""))
        written += "\n".join(["", f"## {title}", "", *([intro, ""] if intro else [])])
        written += "\n".join(_section(code, entry) for code, entry in codes.items())
    return written


def _section(code: str, entry: dict[str, Any]) -> str:
    older = entry.get("aliases", ())
    anchors = "".join(f'<a id="{each.lower()}"></a>' for each in (code, *older))
    message, cause, fix = (_unwrapped(entry[key]) for key in ("text", "cause", "fix"))
    note = f" (formerly also {', '.join(older)})" if older else ""
    body = [f"{anchors}{message}{note}<br>", f"{cause}<br> **Fix:** {fix}", ""]
    return "\n".join([f"### {code}: {entry['title']}", *body])


def _unwrapped(text: str) -> str:
    """Return Markdown with one line for each paragraph; blocks of code stay."""
    pieces = re.split(r"(^```.*?^```$)", text.strip(), flags=re.MULTILINE | re.DOTALL)
    pieces[::2] = [re.sub(r"(?<!\n)\n(?!\n|\||- )", " ", each) for each in pieces[::2]]
    return "".join(pieces)


if __name__ == "__main__":
    FILE.write_text(text(), encoding="utf-8")
