"""The outputs of a report: the text, the page, and the files."""

from __future__ import annotations

import json
import os
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from html.parser import HTMLParser
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.support import doctor_reports as reports
from tests.support.doctor_reports import changed, make_link, make_report
from tests.support.patience import PATIENCE, until
from torchrun_hpc import wire
from torchrun_hpc.doctor import output as outputs
from torchrun_hpc.doctor.output import Output
from torchrun_hpc.doctor.results import printable

if TYPE_CHECKING:
    from torchrun_hpc.errors import Message

REPORT = json.loads(json.dumps(wire.encode(make_report())))

FOLDER, NONE = "Is a directory", "No such file or directory"
NO_FOLDER = "Not a directory"


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "old").write_text("report")
    (tmp_path / "link to none").symlink_to("target")
    (tmp_path / "link out").symlink_to("none/target")
    os.mkfifo(tmp_path / "pipe")
    return tmp_path


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("new", None),
        ("old", None),
        ("pipe", None),
        ("link to none", None),
        ("/dev/null", None),
        ("", FOLDER),
        ("none/file", NONE),
        ("old/file", NO_FOLDER),
        ("link out", None),  # it is replaced
        ("/dev/stdout", None),
    ],
)
def test_a_file_is_tried_and_left_as_it_is(name, problem, folder):
    before = {file: file.lstat() for file in folder.iterdir()}
    file = str(folder / name)
    messages: list[Message] = []
    Output(html=file).check(messages.append)
    assert [message.text for message in messages] == [
        f"cannot write {file}: {each}. The report is printed anyway"
        for each in filter(None, [problem])
    ]
    assert {file: file.lstat() for file in folder.iterdir()} == before


@pytest.mark.parametrize("name", ["new", "old"])
def test_a_folder_of_others(name, folder, as_nobody):
    file = str(folder / name)

    def try_files():
        messages = []
        Output(file).check(lambda message: messages.append(message.text))
        return messages

    for parent in (folder, *folder.parents[:2]):
        parent.chmod(0o755)
    (text,) = as_nobody(try_files)
    assert text.startswith(f"cannot write {file}: Permission denied.")


def test_nobody_waits_for_what_is_tried(folder):
    messages: list[Message] = []
    Output("-", str(folder / "none" / "page")).start_check(messages.append)
    until(lambda: messages)
    assert len(messages) == 1


def test_nothing_is_tried_without_files():
    Output().check(lambda message: pytest.fail(message.text))


def test_a_program_can_write_the_same():
    assert json.loads(json.dumps(asdict(make_report()))) == REPORT


# --- what is written ------------------------------------------------------------------


@pytest.mark.parametrize("name", ["json", "html"])
def test_a_file_that_cannot_be_written(name, tmp_path, capsys):
    """The other one is."""
    files = {"json": tmp_path / "report", "html": tmp_path / "page"}
    files[name] = tmp_path / "none" / "file"
    output = Output(str(files["json"]), str(files["html"]))
    assert not output.write(make_report())
    assert "HPC197" in capsys.readouterr().err
    assert len([*tmp_path.iterdir()]) == 1


def write(path):
    return Output(json=str(path), is_quiet=True).write(make_report())


def test_a_link_is_replaced_and_not_followed(tmp_path):
    victim, file = tmp_path / "victim", tmp_path / "report.json"
    for target in (victim, tmp_path / "nothing"):
        victim.write_text("what must stay")
        file.unlink(missing_ok=True)
        file.symlink_to(target)
        assert write(file)
        assert victim.read_text() == "what must stay"
        assert json.loads(file.read_text()) == REPORT
    assert {*tmp_path.iterdir()} == {victim, file}


def test_a_pipe_of_the_shell_is_written_to(tmp_path, monkeypatch):
    """The report has more than a pipe holds: the reader comes in time."""
    monkeypatch.setattr(outputs, "_as_json", lambda _: "x" * 2**18)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reading = os.open(pipe, os.O_RDWR)  # so that it does not end before it begins
    with os.fdopen(reading, "rb") as read, ThreadPoolExecutor(1) as pool:
        got = pool.submit(read.read, 2**18)
        assert write(f"/dev/fd/{reading}")
        assert got.result(PATIENCE) == b"x" * 2**18


@pytest.mark.parametrize("name", ["/dev/fd", "/proc/self/fd"])
def test_standard_output_that_is_a_file_is_written_to(name, tmp_path):
    """As by `--json=/dev/stdout >> job.log`: what is there already stays."""
    file = tmp_path / "report.json"
    with file.open("w") as output:
        output.write("what must stay\n")
        output.flush()
        assert write(f"{name}/{output.fileno()}")
        assert os.fstat(output.fileno()).st_nlink == 1
    before, written = file.read_text().split("\n", 1)
    assert (before, json.loads(written)) == ("what must stay", REPORT)


def test_a_device_stays_one(capsys):
    before = Path("/dev/null").stat()
    assert write("/dev/null")
    assert Path("/dev/null").stat().st_ino == before.st_ino
    assert capsys.readouterr().err == ""


def test_standard_output_that_is_closed(capsys, monkeypatch, tmp_path):
    """The file is written all the same."""
    monkeypatch.setattr(sys, "stdout", None)
    assert not write(tmp_path / "report")
    assert "HPC101" in capsys.readouterr().err
    assert json.loads((tmp_path / "report").read_text()) == REPORT


ADVICE = reports.finding("HPC184", "/tmp is full", is_suspect=False)  # noqa: S108


def lines_of(report):
    return outputs.render(report).splitlines()


def rows_of(report):
    return {row["node"]: row for row in outputs.node_rows(report)}


@pytest.mark.parametrize(
    "report",
    [make_report(1), make_report(3), make_report(128, slow=range(30), missing=[99])],
    ids=lambda report: len(report.hosts),
)
def test_it_fits_on_a_screen(report):
    lines = lines_of(report)
    assert len(lines) <= 55
    assert max(len(line) for line in lines if "--exclude=" not in line) <= 100
    assert len(report.hosts) < 128 or "and 21 more findings" in lines


NOTHING = {"links": (), "collectives": (), "nodes": (), "workers": ()}
LONG = reports.finding("HPC191", "word " * 16 + "--hpc-interface=ib0")
PAIRS = changed(make_report(3), "links", 0, latency_s=0.002)
PAIRS = changed(PAIRS, "links", 1, backward=1e8)
TEXTS = {
    "three nodes": make_report(3),
    "one node": make_report(1),
    "one slow node of three": make_report(3, slow=[2]),
    "slow and absent nodes of 32": make_report(32, slow=[20, 4], missing=[30]),
    "nothing measured": make_report(2, **NOTHING),
    "a slow worker": changed(make_report(3), "workers", 2, flops=(9e11, 1e12)),
    "slow pairs": changed(PAIRS, "links", 2, problem="no answer"),
    "advice": make_report(3, findings=(ADVICE,)),
    "a long finding": make_report(3, findings=(LONG,)),
    "no site and no launch": make_report(3, missing=[1], launch_id="", site=""),
}


def test_texts(golden):
    golden({case: outputs.render(report) for case, report in TEXTS.items()})


def test_a_terminal_gets_nothing_to_act_on():
    rendered = outputs.render(printable(reports.hostile_report()))
    assert rendered.replace("\n", "").isprintable()


VERDICTS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "advice": {"findings": (ADVICE,)},
    "two pieces of advice": {"findings": (ADVICE,) * 2},
    "one node": {"slow": [2]},
    "two nodes of three": {"slow": [1, 2]},
    "a node without a name": {"slow": [2], "hosts": ("", "", "")},
    "no single node": {"findings": (reports.finding("HPC191", ""),)},
}


def test_the_verdict_comes_first(golden):
    """``--quiet`` prints nothing else."""
    verdicts = {}
    for case, changes in VERDICTS.items():
        report = make_report(3, **changes)
        verdicts[case] = outputs.render(report, is_quiet=True)
        assert outputs.render(report).startswith(f"{verdicts[case]}\n")
    golden(verdicts)


def test_the_worst_node_is_the_first_one():
    rows = rows_of(TEXTS["slow and absent nodes of 32"])
    assert [*rows][:4] == ["jwb0031", "jwb0021", "jwb0005", "jwb0001"]


def test_latency_and_bandwidth_are_of_the_node():
    """It receives slowly; what its partners have among them is not its fault."""
    rows = rows_of(make_report(3, slow=[2]))
    figures = {name: [*row.values()][1:5] for name, row in rows.items()}
    assert figures["jwb0003"] == ["HPC191", "31 us", "192.00 Gbit/s", "3.68 Gbit/s"]
    assert figures["jwb0001"] == ["", "31 us", "184.00 Gbit/s", "192.00 Gbit/s"]


@pytest.mark.parametrize(
    ("changes", "title", "expected"),
    [
        ({}, "CPUs", "0-47 of 96"),
        ({}, "import", "4.0 s"),
        ({"torch": None}, "torch", ""),
        ({"gpus": ()}, "GPUs", "4"),  # what torch sees
        ({"gpus": (), "torch": None}, "GPUs", "0"),
        ({"gpus": (reports.make_gpu(), reports.make_gpu(model="H100"))}, "model",
         "A100, H100"),
    ],
)  # fmt: skip
def test_what_a_node_has(changes, title, expected):
    report = make_report(1, nodes=(reports.make_node(0, **changes),))
    assert rows_of(report)["jwb0001"][title] == expected


def test_figures_have_units():
    row = reports.make_collectives()[3]
    row = replace(row, time_s=1e-3, algbw=2e9, busbw=4e9)
    titles, *lines = outputs.cells(
        outputs.collective_rows([row, replace(row, wrong=-1)])
    )
    assert " ".join(titles[2:]) == "size count time algbw busbw #wrong"
    assert [" ".join(line[2:]) for line in lines] == [
        "1 KiB 256 1.0 ms 2.00 GB/s 4.00 GB/s 0",
        "1 KiB 256 1.0 ms 2.00 GB/s 4.00 GB/s -",
    ]


REPORTS = {
    "1 node": make_report(1),
    "nothing measured": make_report(2, links=(), collectives=(), workers=()),
    "3 nodes, 1 slow": make_report(3, slow=[2]),
    "128 nodes, 40 slow": make_report(128, slow=range(40), missing=[99]),
    "hostile": printable(reports.hostile_report()),
}


class Page(HTMLParser):
    """Reads a page, and compares the tags that open with those that close."""

    def __init__(self, html):
        super().__init__()
        self.html = html
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, Any]]] = []
        self.texts: list[tuple[str, str]] = []
        self.feed(html)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in {"meta", "br"}:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append((self.open[-1] if self.open else "", data))

    def text_of(self, *tags):
        return [data for tag, data in self.texts if tag in tags]


@pytest.fixture(scope="module")
def pages():
    """Return the pages of all reports: they are not changed."""
    return {name: Page(outputs.as_page(report)) for name, report in REPORTS.items()}


@pytest.mark.parametrize("name", REPORTS)
def test_it_needs_nothing_from_outside(name, pages):
    tags = pages[name].tags
    assert not {"script", "link", "img", "iframe", "a"} & {tag for tag, _ in tags}
    for _, attributes in tags:
        for key, value in attributes.items():
            assert not key.startswith("on")
            assert key not in {"src", "href"}
            assert key == "title" or "//" not in value
    assert not re.search(r"url\(|@import", "".join(pages[name].text_of("style")))


def test_names_are_only_text(pages):
    names, found = {*reports.HOSTILE[:2]}, pages["hostile"]
    assert names <= {*found.text_of("td")}
    titles = [words["title"] for tag, words in found.tags if "title" in words]
    assert any(f" to {reports.HOSTILE[2]}: " in each for each in titles)
    assert found.html.replace("\n", "").isprintable()


def test_what_is_wrong_and_the_line_to_copy(pages):
    found = pages["3 nodes, 1 slow"]
    assert found.text_of("strong") == ["Suspicious: jwb0003 (1 of 3 nodes)."]
    assert found.text_of("code") == ["--exclude=jwb0003"]
    assert found.text_of("td")[:4] == [
        "HPC191", "suspect", "jwb0003, with all nodes: 3 Gbit/s",
        "exclude the node, and report it to the administrator",
    ]  # fmt: skip
    assert not pages["1 node"].text_of("code")


def test_the_page_begins_with_the_verdict(pages):
    for name, found in pages.items():
        texts = [data for tag, data in found.texts if tag in {"strong", "h1", "h2"}]
        title = found.text_of("title")
        assert texts[0].startswith(("Nothing suspicious on ", "Suspicious: ")), name
        assert texts[1:] == [
            *title, "Findings", "Nodes", "Pairs of nodes", "Collectives",
        ], name  # fmt: skip


def test_one_node_has_no_section_of_pairs(pages):
    hidden = {
        name: [attributes for tag, attributes in found.tags if tag == "section"]
        for name, found in pages.items()
    }
    assert hidden["1 node"] == [{"hidden": ""}]
    assert hidden["3 nodes, 1 slow"] == hidden["nothing measured"] == [{}]
    assert "0 of 1 pair measured" in pages["nothing measured"].text_of("p")


def test_all_nodes_and_all_collectives_are_there(pages):
    report, cells = REPORTS["128 nodes, 40 slow"], pages["128 nodes, 40 slow"].html
    assert all(f"<td>{host}</td>" in cells for host in report.hosts)
    rows = sum(map(len, (report.findings, report.hosts, report.collectives)))
    assert cells.count("<tr>") == rows + 3 + 127  # titles, and the pairs of each node


def squares_of(links):
    """Return the squares of each node: how bad each is, and what the pointer shows."""
    report = make_report(3, links=links)
    found = re.findall("<td>(jwb[0-9]+)</td><td>(<i.*)</td>", outputs.as_page(report))
    square = re.compile('<i(?: style="--bad: ([0-9.]+)" title="([^"]*)")?></i>')
    return {name: square.findall(row) for name, row in found}


def test_the_pairs_of_a_node_are_a_row_of_squares():
    fast = make_link(0, 1, forward=24e9, backward=24e9)
    slow = make_link(0, 2, forward=24e9, backward=6e9, latency_s=3e-3)
    links = fast, slow, make_link(1, 2, problem="x")
    first, second, third = squares_of(links).values()
    usual, back = "192.00 Gbit/s", "back: 192.00 Gbit/s, latency: 31 us"
    good = ("0.00", f"jwb0001 to jwb0002: {usual}, {back}")
    back = "back: 48.00 Gbit/s, latency: 3.0 ms"
    bad = ("1.00", f"jwb0001 to jwb0003: {usual}, {back}")
    assert (first, second, third) == ([good, bad], [good, ("", "")], [bad, ("", "")])


@pytest.mark.parametrize(
    ("changes", "bad"),
    [
        ({"forward": 18e9}, "0.50"),
        ({"backward": 18e9}, "0.50"),
        ({}, "0.00"),
        ({"latency_s": 62e-6}, "0.50"),
    ],
)
def test_how_red_a_square_is(changes, bad):
    links = [
        make_link(*pair, forward=24e9, backward=24e9)
        for pair in ((0, 1), (0, 2), (1, 2))
    ]
    links[1] = replace(links[1], **changes)
    assert squares_of(links)["jwb0001"][1][0] == bad


def test_each_node_has_a_row(pages):
    found = pages["128 nodes, 40 slow"].html
    assert len(re.findall("</td><td><i", found)) == 127  # one did not join
