"""The page of HTML, as a browser reads it."""

from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from doctor import reports
from doctor.reports import make_link, make_report

from torchrun_hpc.doctor import page
from torchrun_hpc.doctor.results import printable

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
        self.html, self.open, self.tags, self.texts = html, [], [], []
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
    return {name: Page(page.write(report)) for name, report in REPORTS.items()}


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


def test_the_verdict_comes_first(pages):
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
    found = re.findall("<td>(jwb[0-9]+)</td><td>(<i.*)</td>", page.write(report))
    square = re.compile('<i(?: style="--bad: ([0-9.]+)" title="([^"]*)")?></i>')
    return {name: square.findall(row) for name, row in found}


def test_the_pairs_of_a_node_are_a_row_of_squares():
    slow = {"forward": 24e9, "backward": 6e9, "latency_s": 3e-3}
    fast = make_link(0, 1, forward=24e9, backward=24e9)
    links = fast, make_link(0, 2, **slow), make_link(1, 2, problem="x")
    first, second, third = squares_of(links).values()
    good = (
        "0.00",
        ("jwb0001 to jwb0002: 192.00 Gbit/s, back: 192.00 Gbit/s, latency: 31 us"),
    )
    bad = (
        "1.00",
        ("jwb0001 to jwb0003: 192.00 Gbit/s, back: 48.00 Gbit/s, latency: 3.0 ms"),
    )
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
    usual = {"forward": 24e9, "backward": 24e9}
    links = [make_link(*pair, **usual) for pair in ((0, 1), (0, 2), (1, 2))]
    links[1] = replace(links[1], **changes)
    assert squares_of(links)["jwb0001"][1][0] == bad


def test_each_node_has_a_row(pages):
    found = pages["128 nodes, 40 slow"].html
    assert len(re.findall("</td><td><i", found)) == 127  # one has not come
