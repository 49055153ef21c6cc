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
RESULTS = "scripts/lab/results"  # in the repository; its pages and plots are at results/
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
    results = {
        (source := path.relative_to(root).as_posix()): among_pages(source)
        for path in sorted(Path(root, RESULTS).rglob("*"))
        if path.suffix in (".md", ".svg")
    }
    for source, uri in (OUTSIDE | results).items():
        path = posixpath.join(root, source)
        listed = "/" not in source
        level = InclusionLevel.INCLUDED if listed else InclusionLevel.NOT_IN_NAV
        files.append(File.generated(config, uri, abs_src_path=path, inclusion=level))
    return files


def among_pages(path: str) -> str:
    """Path among the pages of a path in the repository."""
    if path.startswith(f"{RESULTS}/"):
        return path.removeprefix("scripts/lab/")
    return OUTSIDE.get(path, path.removeprefix("docs/"))


def on_page_markdown(markdown: str, *, page: Page, **_: Any) -> str:
    """Turn the links of a document into those of its page."""
    there = {uri: source for source, uri in OUTSIDE.items()}
    here = page.file.src_uri
    outside = f"scripts/lab/{here}" if here.startswith("results/") else f"docs/{here}"
    source = there.get(here, outside)

    def become(link: re.Match[str]) -> str:
        wanted = posixpath.normpath(posixpath.join(posixpath.dirname(source), link[1]))
        return posixpath.relpath(among_pages(wanted), posixpath.dirname(here) or ".")

    return LINK.sub(become, markdown)
