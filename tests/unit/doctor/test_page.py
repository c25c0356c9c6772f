"""The page of HTML, as a browser reads it."""

from __future__ import annotations

import base64
import io
import re
from dataclasses import replace
from html.parser import HTMLParser
from xml.etree import ElementTree as ET

import pytest
from doctor import reports
from doctor.reports import make_report

mpl = pytest.importorskip("matplotlib")

from torchrun_hpc.doctor import page  # noqa: E402

pytestmark = pytest.mark.xdist_group("page")  # each page is drawn once

SVG = "{http://www.w3.org/2000/svg}"
REPORTS = {
    "1 node": make_report(1),
    "nothing measured": make_report(2, links=(), collectives=(), workers=()),
    "3 nodes, 1 slow": make_report(3, slow=[2]),
    "128 nodes, 40 slow": make_report(128, slow=range(40), missing=[99]),
    "hostile": reports.hostile_report(),
}


class Page(HTMLParser):
    """Reads a page, and compares the tags that open with those that close."""

    def __init__(self, html):
        super().__init__()
        self.html, self.open, self.tags, self.texts = html, [], [], []
        self.feed(html)
        self.close()
        assert not self.open
        found = re.findall("<svg.*?</svg>", html, re.DOTALL)
        self.pictures = [ET.fromstring(svg) for svg in found]  # noqa: S314 - our own

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
    for tag, attributes in tags:
        for key, value in attributes.items():
            assert not key.startswith("on")
            if key in {"src", "href", "xlink:href"}:
                assert value.startswith(("#", "data:image/png;base64,"))
            elif key != "aria-label" and tag != "svg":
                assert "//" not in value
    assert not re.search(r"url\(|@import", "".join(pages[name].text_of("style")))


def test_settings_of_the_user_change_nothing(pages):
    changes = {"axes.facecolor": "red", "lines.linewidth": 9, "svg.fonttype": "path"}
    with mpl.rc_context(changes):
        assert page.write(REPORTS["1 node"]) == pages["1 node"].html
        assert mpl.rcParams["lines.linewidth"] == 9


def test_letters_that_matplotlib_lacks_are_no_warning(recwarn):
    page.write(REPORTS["hostile"])
    assert not recwarn


def labels_of(picture):
    return {element.text for element in picture.iter(f"{SVG}text")}


def test_names_are_only_text(pages):
    names, found = {*reports.HOSTILE[:2]}, pages["hostile"]
    assert names <= {*found.text_of("td")}
    assert {x[:20] for x in names} <= labels_of(found.pictures[0])
    assert {f"{x}, within a node" for x in names} <= labels_of(found.pictures[2])
    assert found.html.replace("\n", "").isprintable()


def test_what_is_wrong_and_the_line_to_copy(pages):
    found = pages["3 nodes, 1 slow"]
    assert found.text_of("strong") == ["Suspicious: jwb0003 (1 of 3 nodes)."]
    assert found.text_of("code") == ["--exclude=jwb0003"]
    assert found.text_of("td")[:4] == [
        "HPC191", "suspect", "jwb0003, with all nodes: 3 Gbit/s",
        "leave the node out, and tell the administrator",
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


def test_without_pairs_there_is_no_section_of_them(pages):
    hidden = {
        name: [attributes for tag, attributes in found.tags if tag == "section"]
        for name, found in pages.items()
    }
    assert hidden["nothing measured"] == [{"hidden": ""}]
    assert hidden["3 nodes, 1 slow"] == [{}]


def test_all_nodes_and_all_collectives_are_there(pages):
    report, cells = REPORTS["128 nodes, 40 slow"], pages["128 nodes, 40 slow"].html
    assert all(f"<td>{host}</td>" in cells for host in report.hosts)
    rows = sum(map(len, (report.findings, report.hosts, report.collectives)))
    assert cells.count("<tr>") == rows + 3  # titles


def test_what_was_measured_is_drawn(pages):
    for name, words in {
        "1 node": ["Bus"],
        "nothing measured": [],
        "3 nodes, 1 slow": ["Bandwidth", "Latency", "Bus"],
    }.items():
        labels = [picture.get("aria-label") for picture in pages[name].pictures]
        assert labels == pages[name].text_of("figcaption")
        assert [label.split()[0] for label in labels] == words, name


def test_a_slow_way_is_red_and_others_are_blue(pages):
    image = next(pages["3 nodes, 1 slow"].pictures[0].iter(f"{SVG}image"))
    data = image.get("{http://www.w3.org/1999/xlink}href").partition(",")[2]
    pixels = mpl.image.imread(io.BytesIO(base64.b64decode(data)))
    colours = [
        "".join("-" if not a else "r" if r > b else "b" for r, _, b, a in row)
        for row in pixels
    ]
    assert colours == ["-br", "b-r", "bb-"]


def test_the_caption_has_what_the_labels_may_lack(pages):
    many, hostile = pages["128 nodes, 40 slow"], pages["hostile"]
    labels = sorted(labels_of(many.pictures[0]))
    assert labels[-16:-13] == ["jwb0001", "jwb0009", "jwb0017"]
    assert "; suspect: jwb[0001-0040,0100]" in many.text_of("figcaption")[0]
    assert "; x has no figures; suspect: " in hostile.text_of("figcaption")[0]


def test_an_operation_that_the_backend_lacks_has_no_curve():
    rows = tuple(
        row if row.operation == "broadcast" else replace(row, wrong=-1, busbw=0.0)
        for row in reports.make_collectives()
    )
    (curves,) = Page(page.write(make_report(1, collectives=rows))).pictures
    assert labels_of(curves) & {*reports.OPERATIONS} == {"broadcast"}
