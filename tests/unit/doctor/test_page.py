from __future__ import annotations

import re
from html.parser import HTMLParser
from itertools import pairwise
from xml.etree import ElementTree as ET

import pytest
from doctor import reports

from torchrun_hpc.doctor import page

pytest.importorskip("matplotlib")

SVG = "{http://www.w3.org/2000/svg}"
NAMESPACES = {"http://www.w3.org/1999/xlink", "http://www.w3.org/2000/svg"}
VOID = {"meta", "br"}

REPORTS = {
    "1 node": reports.make_report(1),
    "2 nodes, nothing measured": reports.make_report(2, links=[], collectives=[]),
    "3 nodes": reports.make_report(3),
    "3 nodes, 1 slow": reports.make_report(3, slow=[2]),
    "32 nodes, 2 slow, 1 missing": reports.make_report(32, slow=[4, 5], missing=[30]),
    "128 nodes": reports.make_report(128),
    "128 nodes, 40 slow": reports.make_report(128, slow=range(40)),
    "hostile": reports.hostile_report(),
}
each_report = pytest.mark.parametrize("name", REPORTS)


class Page(HTMLParser):
    """Reads a page, and compares the tags that open with those that close."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.texts = [], [], []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append((self.open[-1] if self.open else "", data))

    def attributes(self, tag):
        return [attributes for found, attributes in self.tags if found == tag]

    def text_of(self, *tags):
        return [data for tag, data in self.texts if tag in tags]


@pytest.fixture(scope="module")
def written():
    """Return the pages of all reports: they are not changed."""
    return {name: page.write(report) for name, report in REPORTS.items()}


@pytest.fixture(scope="module")
def parsed(written):
    return {name: Page(text) for name, text in written.items()}


def pictures_of(text):
    """Return the pictures of a page, as XML."""
    found = re.findall("<svg.*?</svg>", text, re.DOTALL)
    return [ET.fromstring(svg) for svg in found]  # noqa: S314 - it is our own


def labels_of(picture):
    return [element.text for element in picture.iter(f"{SVG}text")]


# --- its form -------------------------------------------------------------------------


@each_report
def test_a_page_is_well_formed(name, written, parsed):
    found = parsed[name]
    assert written[name].startswith("<!DOCTYPE html>\n")
    assert found.attributes("html") == [{"lang": "en"}]
    assert len(found.attributes("h1")) == 1
    identifiers = [
        attributes["id"] for _, attributes in found.tags if "id" in attributes
    ]
    assert len(identifiers) == len(set(identifiers))


@each_report
def test_it_needs_nothing_from_outside(name, written, parsed):
    found = parsed[name]
    tags = {tag for tag, _ in found.tags}
    assert not tags & {"script", "link", "img", "image", "iframe", "object", "a"}
    for _, attributes in found.tags:
        for key, value in attributes.items():
            assert not key.startswith("on")
            if key in {"src", "href", "xlink:href"}:
                assert value.startswith("#")
            elif key != "aria-label":
                assert "//" not in (value or "") or value in NAMESPACES
    assert "url(" not in "".join(found.text_of("style"))
    assert "@import" not in written[name]


@each_report
def test_pictures_are_xml_with_a_name_for_those_who_cannot_see_them(name, written):
    for picture in pictures_of(written[name]):
        assert picture.get("role") == "img"
        assert picture.get("aria-label")
        assert picture.get("viewBox")
        assert picture.get("width") is None


@each_report
def test_tables_have_headers(name, parsed):
    found = parsed[name]
    assert {a["scope"] for a in found.attributes("th")} <= {"col", "row"}
    assert all("tabindex" in a for a in found.attributes("div") if "role" in a)


@each_report
def test_the_same_report_gives_the_same_page(name, written):
    assert page.write(REPORTS[name]) == written[name]


def test_settings_of_matplotlib_change_nothing(written):
    import matplotlib as mpl  # noqa: PLC0415

    changes = {"axes.facecolor": "red", "lines.linewidth": 9, "svg.fonttype": "path"}
    with mpl.rc_context(changes):
        assert page.write(REPORTS["3 nodes"]) == written["3 nodes"]
        assert mpl.rcParams["lines.linewidth"] == 9


def test_letters_that_matplotlib_lacks_are_no_warning(recwarn):
    page.write(REPORTS["hostile"])
    assert not recwarn


# --- what comes from the report -------------------------------------------------------


def test_names_are_only_text(written, parsed):
    found = parsed["hostile"]
    cells = found.text_of("th", "td")
    for hostile in ("<script>alert(1)</script>", "&lt;b&gt;", "$\\frac{a}{b}$_x^2"):
        assert hostile in cells
    labels = [
        label for svg in pictures_of(written["hostile"]) for label in labels_of(svg)
    ]
    assert "$\\frac{…{b}$_x^2" in labels
    assert "<script…/script>" in labels
    assert written["hostile"].replace("\n", "").isprintable()


def test_the_line_to_copy(written, parsed):
    assert "--exclude=jwb0003" in parsed["3 nodes, 1 slow"].text_of("code")
    assert "<code>" not in written["3 nodes"]
    assert "no node is suspect" in parsed["3 nodes"].text_of("strong")


def test_findings_with_code_and_remedy(parsed):
    cells = parsed["3 nodes, 1 slow"].text_of("th", "td")
    assert "HPC191" in cells
    assert "leave the node out, and tell the administrator" in cells


def test_all_nodes_and_all_collectives_are_there(written, parsed):
    cells = parsed["128 nodes"].text_of("th")
    assert {f"jwb{number:04}" for number in range(1, 129)} <= {*cells}
    rows = len(REPORTS["128 nodes"]["collectives"])
    assert f"All figures: {rows} rows" in written["128 nodes"]


def test_without_measurements_nothing_is_drawn(written):
    assert not pictures_of(written["2 nodes, nothing measured"])


# --- pictures -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "count"), [("1 node", 1), ("3 nodes", 3), ("128 nodes", 3)]
)
def test_two_maps_and_the_curves(name, count, written):
    assert len(pictures_of(written[name])) == count


def colours_of(picture):
    return re.findall(r"var\(--([a-z0-9-]+)\)", ET.tostring(picture).decode())


def test_a_square_for_each_measured_way(written):
    bandwidth, latency, _ = pictures_of(written["3 nodes, 1 slow"])
    assert colours_of(bandwidth).count("level-0") == 4
    assert colours_of(bandwidth).count("level-4") == 2
    assert colours_of(latency).count("level-0") == 6


def test_pairs_with_a_problem_are_marked():
    report = reports.make_report(3)
    report["links"][0] = reports.broken_link(0, 1)
    text = page.write(report)
    bandwidth, _, _ = pictures_of(text)
    assert colours_of(bandwidth).count("level-0") == 4
    marks = [x for x in bandwidth.iter(f"{SVG}use") if "suspect" in x.get("style")]
    assert len(marks) == 2
    assert "no figures: see the findings" in text


def test_suspect_nodes_are_always_named(written):
    for picture in pictures_of(written["128 nodes, 40 slow"])[:2]:
        labels = labels_of(picture)
        assert {f"jwb{number:04}" for number in range(1, 41)} <= {*labels}


@pytest.mark.parametrize("name", ["32 nodes, 2 slow, 1 missing", "128 nodes"])
def test_names_do_not_lie_upon_each_other(name, written):
    picture = pictures_of(written[name])[0]
    beside = [text for text in picture.iter(f"{SVG}text") if text.get("y")]
    heights = sorted(
        float(text.get("y")) for text in beside if "-0" in text.get("transform")
    )
    gaps = [after - before for before, after in pairwise(heights)]
    assert len(gaps) > 8
    assert min(gaps) > 10  # points, as the letters


@pytest.mark.parametrize(
    ("ranks", "gap", "expected"),
    [
        ([0, 5], 2.0, [0, 5]),
        ([4, 5], 2.0, [3.5, 5.5]),
        ([0, 1], 2.0, [0, 2]),
        ([8, 9], 2.0, [7, 9]),
        ([*range(10)], 5.0, [*range(10)]),
        ([], 2.0, []),
    ],
)
def test_names_move_apart(ranks, gap, expected):
    assert page._spread(ranks, gap, 9) == pytest.approx(expected)


def test_a_curve_for_each_operation_within_a_node_the_slowest(written):
    curves = pictures_of(written["3 nodes"])[2]
    assert {f"series-{i}" for i in range(4)} <= {*colours_of(curves)}
    labels = labels_of(curves)
    assert "1 KiB" in labels
    assert "100" in labels


def test_an_operation_that_the_backend_lacks_has_no_curve():
    rows = reports.make_collectives(8)
    for row in rows:
        if row["operation"] != "broadcast":
            row.update(wrong=-1, time_s=0.0, algbw=0.0, busbw=0.0)
    text = page.write(reports.make_report(2, collectives=rows))
    assert {c for c in colours_of(pictures_of(text)[2]) if "series" in c} == {
        "series-0"
    }
    for row in rows:
        row["busbw"] = 0.0
    assert len(pictures_of(page.write(reports.make_report(2, collectives=rows)))) == 2


# --- colours --------------------------------------------------------------------------


def luminance(colour):
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [
        p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts
    ]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one, other):
    """Return the ratio of WCAG 2.2, 1.4.3."""
    darker, lighter = sorted([luminance(one), luminance(other)])
    return (lighter + 0.05) / (darker + 0.05)


def schemes():
    """Return the colours of the page: light, and dark where they differ."""
    light, dark = (
        dict(re.findall(r"--([a-z0-9-]+): (#[0-9a-f]{6});", part))
        for part in page._STYLE.split("@media (prefers-color-scheme: dark)")
    )
    return [light, {**light, **dark}]


@pytest.mark.parametrize("colours", schemes(), ids=["light", "dark"])
def test_colours_can_be_told_from_the_background(colours):
    for back in ("back", "box"):
        for name in ("text", "suspect", "healthy"):
            assert contrast(colours[name], colours[back]) >= 4.5
    for i in range(page._SERIES):
        assert contrast(colours[f"series-{i}"], colours["back"]) >= 3
    levels = [contrast(colours[f"level-{i}"], colours["back"]) for i in range(5)]
    assert levels == sorted(levels)
    assert levels[0] >= 1.5
    assert min(b / a for a, b in pairwise(levels)) >= 1.3
