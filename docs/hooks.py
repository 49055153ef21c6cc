"""For MkDocs: pages from outside docs/, and links that hold on GitHub and on the site alike.

A link in a document is relative to its place in the repository, as GitHub reads it. Here it becomes
relative to the page that the document is on the site.
"""

from __future__ import annotations

import posixpath
import re
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

# Path in the repository -> path among the pages.
OUTSIDE = {
    "README.md": "index.md",
    "ARCHITECTURE.md": "architecture.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "data/pocket/README.md": "pocket.md",
    "data/pocket-draft/README.md": "pocket_draft.md",
}
LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#)([^)\s#]+)")


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add what lies outside docs/; what no menu names is reached by links."""
    root = posixpath.dirname(config.config_file_path)
    for source, uri in OUTSIDE.items():
        path = posixpath.join(root, source)
        listed = "/" not in source
        level = InclusionLevel.INCLUDED if listed else InclusionLevel.NOT_IN_NAV
        files.append(File.generated(config, uri, abs_src_path=path, inclusion=level))
    return files


def on_page_markdown(markdown: str, *, page: Page, **_: Any) -> str:
    """Turn the links of a document into those of its page."""
    there = {uri: source for source, uri in OUTSIDE.items()}
    source = there.get(page.file.src_uri, f"docs/{page.file.src_uri}")

    def become(link: re.Match[str]) -> str:
        wanted = posixpath.normpath(posixpath.join(posixpath.dirname(source), link[1]))
        uri = OUTSIDE.get(wanted, wanted.removeprefix("docs/"))
        return posixpath.relpath(uri, posixpath.dirname(page.file.src_uri) or ".")

    return LINK.sub(become, markdown)
