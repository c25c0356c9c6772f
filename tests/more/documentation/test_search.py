"""The search of the site finds the right page among the first three."""

from __future__ import annotations

import json

import pytest

from tests.support import ROOT
from tests.support.cluster.commands import require_package

# What people search for, and the page that they need.
SEARCHES = {
    "my job hangs": "troubleshooting/",
    "stuck": "troubleshooting/",
    "deadlock": "troubleshooting/",
    "NCCL timeout": "troubleshooting/",
    "out of memory": "troubleshooting/",
    "which line for my cluster": "run/",
    "resume before the time limit": "checkpoints/",
    "log to files": "frameworks/",
    "wandb": "frameworks/",
    "install centrally": "install/",
    "HPC125": "messages/",
}


@pytest.fixture(scope="module")
def search():
    require_package("lunr")
    from lunr import lunr  # noqa: PLC0415

    file = ROOT / "build" / "site" / "search" / "search_index.json"
    sections = json.loads(file.read_text(encoding="utf-8"))["docs"]
    documents = [
        (dict(each, ref=str(number)), {"boost": each.get("boost", 1)})
        for number, each in enumerate(sections)
    ]
    fields = [{"field_name": "title", "boost": 1000}, {"field_name": "text"}]
    index = lunr(ref="ref", fields=fields, documents=documents)

    def pages(words):
        """Return the pages by the score of Material's own search."""
        terms = words.lower().split()
        found = []
        for each in index.search(" ".join(f"{term}*" for term in terms)):
            place = sections[int(each["ref"])]["location"]
            known = "".join(f" {term}" for term in each["match_data"].metadata)
            share = sum(f" {term[:4]}" in known for term in terms) / len(terms)
            score = each["score"] * (1 + (("#" not in place) + share) ** 2)
            found.append((-score, place.partition("#")[0]))
        return list(dict.fromkeys(page for _, page in sorted(found)))

    return pages


@pytest.mark.parametrize(("words", "page"), SEARCHES.items())
def test_search(search, words, page):
    assert page in search(words)[:3]


def test_programs_are_not_found(search):
    assert not [page for page in search("init_process_group") if ".py" in page]
