"""Add files from outside docs/ to the site, and rewrite the links to them.

Pages are written to be read in the repository, too. So a link leads to where a file is
there: `../examples/README.md`, `../examples/ddp.py`. What a page or the navigation
names outside of docs/ becomes a page of the site; a program becomes a page that shows
it.
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
# On the site this folder has another name: the page patches.md has its place.
FOLDER, PLACE = "patches/", "module-systems/"

# The path of a link of Markdown, without its anchor; not an address.
_LINK = re.compile(r"(?<=\]\()(?![a-z]+:)([^)#\s]+)")
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

    def rewritten(match: re.Match[str]) -> str:
        target = _on_site(_target(_in_repository(here), match[1]))
        return posixpath.relpath(target, posixpath.dirname(here) or ".")

    return _LINK.sub(rewritten, markdown)


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
    shown = f"# {Path(uri).name}\n\n````{language} title={uri!r}\n{text}````\n"
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
