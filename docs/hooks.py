"""Hooks of the site: files from outside docs/, their links, search, and short code.

The pages can also be read in the repository. So a link names the file there:
`../examples/README.md`, `../examples/ddp.py`. Each file outside docs/ that a page or
the navigation names becomes a page of the site. A program becomes a page that shows it,
which the search leaves out.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
DOCS = "docs/"
# This folder has another name on the site.
FOLDER, PLACE = "patches/", "module-systems/"

# The path of a link of Markdown, without its anchor; not an address.
_LINK = re.compile(r"(?<=\]\()(?![a-z]+:)([^)#\s]+)")
# Code that is never broken: an option, a file name.
_SHORT = re.compile(r"<code>([^<>]{1,30})</code>")
# A search finds these pages first.
_BOOSTED = {"README.md": 2, "run.md": 2, "install.md": 2, "troubleshooting.md": 2}
_LANGUAGES = {".py": "python", ".sh": "bash", ".patch": "diff", ".toml": "toml"}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add what the pages, and the navigation, name outside of docs/."""
    pages = [file.src_uri for file in files.documentation_pages()]
    waiting = [_in_repository(uri) for uri in [*pages, *_named(config.nav or [])]]
    seen = set()
    while waiting:
        uri = waiting.pop()
        if uri in seen or not (ROOT / uri).is_file():
            continue
        seen.add(uri)
        if not uri.startswith(DOCS):
            files.append(_outside(uri, config))
        if uri.endswith(".md"):
            waiting += _links(uri)
    places = [file.dest_uri for file in files]
    double = {place for place in places if places.count(place) > 1}
    if double:
        raise PluginError(f"two files have the same place on the site: {double}")
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Rewrite the links of a page to where the site has their targets."""
    here = page.file.src_uri
    if here in _BOOSTED:
        page.meta["search"] = {"boost": _BOOSTED[here]}
    if here.startswith("tests/"):
        page.meta["search"] = {"exclude": True}

    def rewritten(match: re.Match[str]) -> str:
        target = _on_site(_target(_in_repository(here), match[1]))
        return posixpath.relpath(target, posixpath.dirname(here) or ".")

    return _LINK.sub(rewritten, markdown)


def on_page_content(html: str, **_: Any) -> str:
    """Mark short code in a sentence: a line must not break in it."""
    return _SHORT.sub(r'<code class="short">\1</code>', html)


def _named(nav: Any) -> Iterator[str]:
    """Walk the navigation; yield its pages."""
    if isinstance(nav, str):
        yield nav
        return
    for part in nav.values() if isinstance(nav, dict) else nav:
        yield from _named(part)


def _links(uri: str) -> list[str]:
    """Return the files of the repository to which a page links."""
    paths = _LINK.findall((ROOT / uri).read_text(encoding="utf-8"))
    return [_target(uri, path) for path in paths]


def _target(uri: str, path: str) -> str:
    """Return the file to which a link leads; of a folder, its page."""
    target = posixpath.normpath(posixpath.join(posixpath.dirname(uri), path))
    return f"{target}/README.md" if (ROOT / target).is_dir() else target


def _outside(uri: str, config: MkDocsConfig) -> File:
    """Make a page of a file that is not in docs/."""
    if uri.endswith(".md"):
        return File.generated(config, _on_site(uri), abs_src_path=str(ROOT / uri))
    text = (ROOT / uri).read_text(encoding="utf-8")
    language = _LANGUAGES.get(Path(uri).suffix, "text")
    excluded = "---\nsearch:\n  exclude: true\n---\n"
    shown = (
        f"{excluded}# {Path(uri).name}\n\n````{language} title={uri!r}\n{text}````\n"
    )
    return File.generated(config, _on_site(uri), content=shown)


def _on_site(uri: str) -> str:
    """Return where the site has a file of the repository."""
    if uri.startswith(DOCS):
        return uri.removeprefix(DOCS)
    if uri.startswith(FOLDER):
        uri = PLACE + uri.removeprefix(FOLDER)
    return uri if uri.endswith(".md") else f"{uri}.md"


def _in_repository(uri: str) -> str:
    """Return the file of the repository that a page of the site is made from."""
    if (ROOT / DOCS / uri).is_file():
        return DOCS + uri
    return FOLDER + uri.removeprefix(PLACE) if uri.startswith(PLACE) else uri
