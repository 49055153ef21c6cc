"""MkDocs hooks: pages from outside docs/, a page for every drafter, and links that hold on the site too.

A link in a document is relative to its place in the repository, as GitHub reads it. Here it becomes
relative to the page that the document is on the site. A drafter without a page in docs/drafters gets
one that is generated from its class and its yaml.
"""

from __future__ import annotations

import ast
import posixpath
import re
from pathlib import Path
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
DRAFTERS = "drafters/*.md"  # in the menu: all of them
OPTION = re.compile(r"^(\w+): *([^#\n]*?) *(?:# *(.*))?$", re.M)  # a top-level line of a drafter's yaml
LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#)([^)\s#]+)")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Put a line for every drafter into the menu; its title is the heading of its page."""
    pages = [f"drafters/{name}.md" for name in drafters(Path(config.config_file_path).parent)]

    def expanded(items: list[Any]) -> list[Any]:
        found = []
        for item in items:
            if isinstance(item, dict):
                item = {
                    title: expanded(part) if isinstance(part, list) else part for title, part in item.items()
                }
            found += pages if item == DRAFTERS else [item]
        return found

    config.nav = expanded(config.nav or [])
    return config


def drafters(root: Path) -> list[str]:
    """Names of the yaml files in conf/drafter, but for `auto`, which chooses one of the others."""
    return sorted(path.stem for path in (root / "conf" / "drafter").glob("*.yaml") if path.stem != "auto")


def drafter_page(root: Path, name: str) -> str:
    """A page from the module's docstring and the yaml's options and comments."""
    yaml = (root / "conf" / "drafter" / f"{name}.yaml").read_text()
    options = {key: (value, comment) for key, value, comment in OPTION.findall(yaml)}
    place = options["_target_"][0].removesuffix(".for_target")
    module = root / "src" / Path(*place.split(".")[:-1]).with_suffix(".py")
    rows = [
        f"| `drafter.{key}` | `{value}` | {comment} |"
        for key, (value, comment) in options.items()
        if key not in ("_target_", "_partial_", "defaults")
    ]
    return "\n".join(
        [
            *(f"# {name}", "", ast.get_docstring(ast.parse(module.read_text())) or "", ""),
            *(f"    python train.py drafter={name}", ""),
            *(f"All options are in `conf/drafter/{name}.yaml`; the class is `{place}`.", ""),
            *("| option | default | meaning |", "|---|---|---|", *rows, ""),
        ]
    )


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add what lies outside docs/, reached by links where no menu names it, and pages that nobody wrote."""
    root = posixpath.dirname(config.config_file_path)
    for name in drafters(Path(root)):
        if files.get_file_from_path(uri := f"drafters/{name}.md") is None:
            files.append(File.generated(config, uri, content=drafter_page(Path(root), name)))
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
