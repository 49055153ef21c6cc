"""Pages and parts of pages that are written from scorecards."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path

from claims.budgets import PLOT, budget_table, plot_budgets
from claims.cards import NAME, RESULTS, TEMPERATURES, Line, line_of, read_folder, refuse_dirty
from claims.estimates import SeedNoise, seed_noise
from claims.judged import Claims, Folder, Paper, read_claims, rows_of
from claims.tables import by_target, differences, other_plans, shows_minutes, table
from decode.errors import UserError
from distill.scoring.tables import markdown

ROOT = Path(__file__).resolve().parents[3]
CLAIMS = Path(__file__).with_name("claims.yaml")
BLOCK = re.compile(
    r"(?P<begin><!-- (?P<what>results|budgets): (?P<words>[^>]+) -->\n).*?(?P<end><!-- end of (?P=what) -->)",
    re.DOTALL,
)
MINUTES = (
    " CPU minutes are of training steps: they have the target's passes where it runs in each step "
    "(`taps=online`, which short runs choose)."
)
HEAD = (
    "# Claims of papers, tested here\n"
    "\n"
    "Written by `python scripts/lab/claims.py` from the linked scorecards and "
    "`scripts/lab/claims/claims.yaml`; CI fails where they differ. tau is replayed on the target's "
    "answers to held-out prompts.\n"
    "\n"
    "- *difference*: tau of the first minus tau of the second, with its 95 % interval. Several seeds "
    "in both: paired by seed, Student's t. One seed: paired by prompt, bootstrap; the interval is "
    "widened by the noise of seeds for each of the two that is trained. That noise, the standard "
    "deviation of tau over seeds, is {noise}, from lines with several seeds (but for `noise_without` in "
    "claims.yaml).\n"
    "- *same*, *opposite*: the interval is on the paper's side of zero, or on the other. *Not "
    "distinguished*: it contains zero. *Not in the regime*: the claim is about other settings; the "
    "numbers are what was seen here.\n"
    "- Targets here are small; papers have targets of 7B parameters and more.\n"
)


def write_all(check: bool) -> list[str]:
    """Write every page, or only compare.

    Args:
        check: whether files stay as they are.

    Returns:
        Names of the pages that differ from what the scorecards say.

    Raises:
        UserError: a result cannot be read, or comes from uncommitted changes; see also `read_claims`.
    """
    claims = read_claims(CLAIMS)
    folders = claims.folders
    lines = {name: read_folder(RESULTS / name) for name in folders}
    for file in sorted(RESULTS.rglob("*.json")):
        refuse_dirty(file)
        if NAME.fullmatch(file.stem) and str(file.parent.relative_to(RESULTS)) not in folders:
            raise UserError(f"{file.parent.relative_to(ROOT)}: no such folder in claims.yaml; add it there")
    noise = {t: seed_noise(noise_lines(lines, folders), t) for t in TEMPERATURES}
    pages = {ROOT / "docs" / "claims.md": claims_page(claims, lines, noise)}
    for name, folder in folders.items():
        pages[RESULTS / name / "README.md"] = folder_page(folder, lines[name], noise)
    for file in sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]):
        text = file.read_text(encoding="utf-8")
        if BLOCK.search(text):
            pages[file] = BLOCK.sub(_filled(lines, folders, noise, file), text)
    changed = [file for file, text in pages.items() if not file.exists() or file.read_text("utf-8") != text]
    if not check:
        for file in changed:
            file.write_text(pages[file], encoding="utf-8")
        for name in (name for name, folder in folders.items() if folder.budgets):
            plot_budgets(lines[name], RESULTS / name / PLOT)
    return [str(file.relative_to(ROOT)) for file in changed]


def noise_lines(lines: Mapping[str, Sequence[Line]], folders: Mapping[str, Folder]) -> list[Line]:
    """Lines whose seeds tell the noise of tau."""
    return [
        line
        for name, found in lines.items()
        for line in found
        if not any(fnmatch(line.name, pattern) for pattern in folders[name].noise_without)
    ]


def claims_page(
    claims: Claims,
    lines: Mapping[str, Sequence[Line]],
    noise: Mapping[float, SeedNoise | None],
) -> str:
    """docs/claims.md.

    Raises:
        UserError: see `rows_of`.
    """
    known = [f"{found.deviation:.3f} at T={t:g}" for t, found in noise.items() if found]
    head = ["where", "tau", "over", "difference", "interval over", "verdict"]
    summary, parts = [["paper", "claim", "verdicts"]], list[str]()
    for paper in claims.papers:
        for claim in paper.claims:
            rows = rows_of(claim, lines, claims.folders, noise)
            verdicts = Counter(row[-1] for row in rows)
            said = ", ".join(f"{verdict} {number}x" for verdict, number in verdicts.most_common())
            summary.append([paper.name, claim.says, said])
            parts.append(f"## {paper.name}: {claim.says}\n\n{_source(paper)}")
            parts.append(markdown([head, *rows]))
            if claim.regime:
                parts.append(f"Not in the regime: {claim.regime}")
    others = [
        [f"{paper.name}, {_source(paper)}", claim.says, claim.state]
        for paper in claims.papers
        for claim in paper.elsewhere
    ]
    parts += ["## Not judged by scorecards", markdown([["paper", "claim", "here"], *others])]
    planned = [[one.what, one.needs, one.state] for one in claims.experiments]
    parts += ["## Experiments that would settle more", markdown([["what", "needs", "state"], *planned])]
    parts = [HEAD.format(noise=" and ".join(known) or "unknown"), markdown(summary), *parts]
    return "\n\n".join(part.strip() for part in parts) + "\n"


def _source(paper: Paper) -> str:
    return f"[arXiv:{paper.arxiv}](https://arxiv.org/abs/{paper.arxiv})"


def folder_page(folder: Folder, lines: Sequence[Line], noise: Mapping[float, SeedNoise | None]) -> str:
    """README.md of a folder of results.

    Args:
        folder: what claims.yaml says of it.
        lines: all of its results.
        noise: of seeds, by temperature.
    """
    rows = [row for line in lines for one in line.results if (row := one.row(TEMPERATURES[0]))]
    cards = [one.card for line in lines for one in line.results]
    plans = dict.fromkeys(line.plans[0] for line in lines)
    answers = sorted({len(row.counts.tokens) for row in rows})
    machines = dict.fromkeys(card.conditions.hardware for card in cards)
    dtypes = dict.fromkeys(card.conditions.dtype for card in cards)
    parts = [
        f"# {folder.title}",
        "Written by `python scripts/lab/claims.py`.",
        table(lines),
        f"Target: {folder.target}, {', '.join(dtypes)}. {', '.join(plans)}, match rule. tau: replayed on the "
        f"target's answers to {', '.join(map(str, answers))} held-out prompts, with its 95 % interval: of "
        "one seed over prompts, of several that of their mean (Student's t). A speedup is shown where every "
        "row was timed with nothing else on the machine." + MINUTES * shows_minutes(lines),
        f"Machines: {'; '.join(machines)}.",
    ]
    if folder.budgets:
        parts += ["## By training time", f"![tau over CPU minutes of training]({PLOT})"]
        parts += [budget_table(lines, folder.budgets, noise)]
    if folder.against and (compared := differences(lines, folder.against)):
        parts += [f"## Over {folder.against}", compared]
    if others := other_plans(lines):
        parts += ["## Other drafts of the same checkpoints", others]
    return "\n\n".join(parts) + "\n"


def _filled(
    lines: Mapping[str, Sequence[Line]],
    folders: Mapping[str, Folder],
    noise: Mapping[float, SeedNoise | None],
    file: Path,
) -> Callable[[re.Match[str]], str]:
    """The text of a part of a page.

    <!-- results: FOLDER [LINE ...] [| FOLDER [LINE ...]] --> has lines of folders, all where none is named;
    <!-- budgets: FOLDER --> has the best drafters by training time.
    """

    def known(folder: str) -> Sequence[Line]:
        if folder not in lines:
            raise UserError(f"{file.relative_to(ROOT)}: {folder}: no such folder in claims.yaml")
        return lines[folder]

    def filled(match: re.Match[str]) -> str:
        if match["what"] == "budgets":
            folder = match["words"].strip()
            written = budget_table(known(folder), folders[folder].budgets, noise)
            return f"{match['begin']}\n{written}\n\n{match['end']}"
        chosen = {}
        for part in match["words"].split("|"):
            folder, *names = part.split()
            found = [line_of(known(folder), name, folder) for name in names] or known(folder)
            chosen[folders[folder].target] = found
        return f"{match['begin']}\n{by_target(chosen)}\n\n{match['end']}"

    return filled
