"""Build the documentation site: python scripts/build_site.py [FOLDER]; without FOLDER, into site/.

The pages are the documents of docs/, documents from outside docs/, and a page for every drafter. They are
written to a temporary folder, where zensical builds them. A link in a document is relative to its place in
the repository, as GitHub reads it. In the temporary folder it becomes relative to the page that the document
is on the site. A drafter without a page in docs/drafters gets one that is generated from its class and its
yaml. A link or an anchor that leads nowhere ends the build with exit code 1, as does a page that is missing
in the menu.
"""

from __future__ import annotations

import argparse
import ast
import posixpath
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[1]
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
LINKED = ("pocket.md", "pocket_draft.md", "results/")  # reached by links; the menu need not have them
DRAFTERS = "drafters/*.md"  # in the menu: all of them
OPTION = re.compile(r"^(\w+): *([^#\n]*?) *(?:# *(.*))?$", re.M)  # a top-level line of a drafter's yaml
LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#)([^)\s#]+)")
PICTURE = re.compile(r"(?:(?<= src=\")|(?<= srcset=\"))(?![a-z]+:)[^\"\s]+")  # of HTML in a document


class SiteError(Exception):
    """The site cannot be built as it should be."""


def main() -> int:
    """Build the site; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split(":")[0])
    parser.add_argument("folder", nargs="?", type=Path, default=ROOT / "site", help="where the site goes")
    folder = parser.parse_args().folder.resolve()
    with tempfile.TemporaryDirectory(prefix="foredraft-site-") as temporary:
        try:
            write_project(Path(temporary))
        except SiteError as error:
            print(error, file=sys.stderr)
            return 1
        done = subprocess.run(
            [sys.executable, "-m", "zensical", "build", "--strict"], cwd=temporary, check=False
        )
        if done.returncode:
            return 1
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(Path(temporary, "site"), folder)
    print(f"open {folder / 'index.html'}")
    return 0


def write_project(folder: Path) -> None:
    """Write mkdocs.yml and all pages to a folder, as zensical reads them.

    Raises:
        SiteError: a page is not in the menu, or the menu names a page that does not exist.
    """
    config = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    config["nav"] = menu(config["nav"])
    for plugin in config["plugins"]:
        if isinstance(plugin, dict) and "mkdocstrings" in plugin:
            python = plugin["mkdocstrings"]["handlers"]["python"]
            python["paths"] = [str(ROOT / path) for path in python["paths"]]
    pages = folder / config["docs_dir"]
    shutil.copytree(ROOT / "docs", pages)
    for name in drafters(ROOT):
        if not (page := pages / "drafters" / f"{name}.md").exists():
            page.write_text(drafter_page(ROOT, name))
    for source, page in outside().items():
        (pages / page).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / source, pages / page)
    check_menu(config["nav"], pages)
    for page in pages.rglob("*.md"):
        page.write_text(with_links_of_site(page.read_text(), page.relative_to(pages).as_posix()))
    (folder / "mkdocs.yml").write_text(yaml.safe_dump(config, sort_keys=False))


def menu(items: list[Any]) -> list[Any]:
    """The menu with a line for every drafter; its title is the heading of its page."""
    found = []
    for item in items:
        if isinstance(item, dict):
            item = {title: menu(part) if isinstance(part, list) else part for title, part in item.items()}
        found += [f"drafters/{name}.md" for name in drafters(ROOT)] if item == DRAFTERS else [item]
    return found


def named(items: list[Any]) -> Iterator[str]:
    """All pages of a menu."""
    for item in items:
        for part in item.values() if isinstance(item, dict) else [item]:
            yield from named(part) if isinstance(part, list) else [part]


def check_menu(nav: list[Any], pages: Path) -> None:
    """Compare the menu with the pages.

    Raises:
        SiteError: a page is not in the menu, or the menu names a page that does not exist.
    """
    found = {path.relative_to(pages).as_posix() for path in pages.rglob("*.md")}
    in_menu = set(named(nav))
    if missing := sorted(page for page in found - in_menu if not page.startswith(LINKED)):
        raise SiteError(f"mkdocs.yml: the menu lacks {', '.join(missing)}; add a line to nav")
    if unknown := sorted(in_menu - found):
        raise SiteError(f"mkdocs.yml: the menu names {', '.join(unknown)}, which no document is")


def drafters(root: Path) -> list[str]:
    """Names of the yaml files in conf/drafter, but for `auto`, which chooses one of the others."""
    return sorted(path.stem for path in (root / "conf" / "drafter").glob("*.yaml") if path.stem != "auto")


def drafter_page(root: Path, name: str) -> str:
    """A page from the module's docstring and the yaml's options and comments."""
    text = (root / "conf" / "drafter" / f"{name}.yaml").read_text()
    options = {key: (value, comment) for key, value, comment in OPTION.findall(text)}
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


def outside() -> dict[str, str]:
    """Path in the repository -> path among the pages, of all that lies outside docs/."""
    results = sorted(path for path in (ROOT / RESULTS).rglob("*") if path.suffix in (".md", ".svg"))
    return OUTSIDE | {
        source: among_pages(source) for source in (p.relative_to(ROOT).as_posix() for p in results)
    }


def among_pages(path: str) -> str:
    """Path among the pages of a path in the repository."""
    if path.startswith(f"{RESULTS}/"):
        return path.removeprefix("scripts/lab/")
    return OUTSIDE.get(path, path.removeprefix("docs/"))


def with_links_of_site(markdown: str, page: str) -> str:
    """Turn the links and pictures of a document into those of its page.

    Args:
        markdown: the document.
        page: path of the document among the pages.
    """
    there = {uri: source for source, uri in OUTSIDE.items()}
    source = there.get(page, f"scripts/lab/{page}" if page.startswith("results/") else f"docs/{page}")

    def become(link: re.Match[str]) -> str:
        wanted = posixpath.normpath(posixpath.join(posixpath.dirname(source), link[0]))
        return posixpath.relpath(among_pages(wanted), posixpath.dirname(page) or ".")

    return PICTURE.sub(become, LINK.sub(become, markdown))


if __name__ == "__main__":
    sys.exit(main())
