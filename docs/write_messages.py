"""Write messages.md from the data in the package: ``python docs/write_messages.py``."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

FILE = Path(__file__).with_name("messages.md")
DATA = Path(__file__).parents[1] / "torchrun_hpc" / "messages.toml"

HEAD = """# Messages by code

<!-- Written by docs/write_messages.py from torchrun_hpc/messages.toml. Do not edit. -->

Every message of the launcher has a code. It is one line on stderr. If there is a line
to copy, it follows on its own:

```text
torchrun_hpc: error[HPC061]: this is the batch script of a job of 8 nodes, ...
    srun --nodes=8 --ntasks-per-node=1 python -m torchrun_hpc train.py
torchrun_hpc: warning[HPC092]: 4 workers share 2 CPUs ...
torchrun_hpc: note[HPC114]: 3 of 4 nodes have joined after 30 s ...
```

An **error** ends the launch. A **warning** does not. A **note** reports a wait, a
restart, or a corrected value; on the start line it comes after a semicolon.

If all nodes find the same fault, the first one reports it. If only one node finds it,
that node reports it with its name. A node that cannot start sends the reason to the
head node for up to two minutes. Then all nodes end, and node 0's last line names the
first failure (HPC125). Without a known head node, or with torch's own rendezvous, the
other nodes wait for this one (HPC114).

| exit code | meaning |
|---|---|
| 2 | wrong use: an error below, except for the next row |
| 1 | the job failed (HPC125, HPC127), or the rendezvous did (HPC085, HPC112) |
| other | the same as torchrun's |

The messages below are shortened. Words in capitals stand for values.
"""


def parts() -> dict[str, dict[str, Any]]:
    """Return the data: for each part of the page its `intro`, and the codes."""
    return tomllib.loads(DATA.read_text(encoding="utf-8"))


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
    pieces[::2] = [re.sub(r"(?<!\n)\n(?![\n|-])", " ", each) for each in pieces[::2]]
    return "".join(pieces)


if __name__ == "__main__":
    FILE.write_text(text(), encoding="utf-8")
