"""The queue of measurements that need a GPU.

    python scripts/gpu.py list                  what there is to measure, and what is done
    python scripts/gpu.py run --minutes 25      measures what there is time for; the same command continues
    python scripts/gpu.py page                  writes the page of all results
    python scripts/gpu.py pack FOLDER           a folder that runs on a machine without a network

Each result is a JSON file of the folder --out, with its commit and card.
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent / "lab"))

from decode.errors import UserError
from decode.hardware import hardware
from distill.utils.atomic_files import put
from distill.utils.provenance import commit
from gpu_queue.pack import SCRIPT, pack
from gpu_queue.page import page
from gpu_queue.results import Conditions, path_of, read, state
from gpu_queue.runner import chosen, run
from gpu_queue.steps import steps

PAGE = "README.md"  # in the folder of the results
GROUPS = ", ".join(dict.fromkeys(step.group for step in steps()))


def conditions(tiny: bool, measures: bool) -> Conditions:
    """What results of this machine belong to.

    Args:
        tiny: whether steps run at a tiny size on a CPU.
        measures: False: to list or write pages only.

    Raises:
        UserError: there is no GPU to measure on.
    """
    if tiny:
        return Conditions(commit(), hardware(torch.device("cpu")), True)
    if torch.cuda.is_available():
        return Conditions(commit(), hardware(torch.device("cuda")), False)
    if measures:
        raise UserError("no GPU here: `list` shows what would run, `run --tiny` tries it on a CPU")
    return Conditions(commit(), "", False)


def list_steps(given: Namespace) -> int:
    """Print every step with its estimate and its state."""
    here, listed = conditions(given.tiny, measures=False), chosen(steps(), given.names)
    states = {step.name: state(step, given.out, here) for step in listed}
    for step in listed:
        result = read(path_of(step, given.out)) if states[step.name] == "failed" else None
        reason = f" ({result.failed})" if result else ""
        print(f"{states[step.name]:8}{step.minutes:4g} min  {step.name}: {step.shows}{reason}")
        if given.commands:
            print(f"        python {' '.join(step.command(f'{step.name}.json', given.tiny))}")
    left = [step for step in listed if states[step.name] != "done"]
    minutes = sum(step.minutes for step in left)
    print(f"{len(listed) - len(left)} done, {len(left)} to run in about {minutes:g} min")
    return 0


def run_steps(given: Namespace) -> int:
    """Measure; 1 if a step failed."""
    here = conditions(given.tiny, measures=True)
    counts = run(chosen(steps(), given.names), given.out, here, given.minutes, given.again)
    print(", ".join(f"{count} {what}" for what, count in counts.items()))
    return int(counts["failed"] > 0)


def write_page(given: Namespace) -> int:
    """Write the page of the results in the folder, those that have a step first."""
    known = [path_of(step, given.out) for step in steps()]
    paths = [path for path in known if path.exists()]
    paths += sorted(path for path in given.out.glob("*.json") if path not in known)
    if not paths:
        raise UserError(f"{given.out}: has no results; `run` makes them")
    results = [result for path in paths if (result := read(path))]
    # One heading for each commit and card; the order of steps is kept within.
    results.sort(key=lambda result: (result.tiny, result.hardware, result.commit))
    put(given.out / PAGE, page(results))
    print(given.out / PAGE)
    return 0


def pack_folder(given: Namespace) -> int:
    """Write the folder, and say how it is used."""
    size = pack(given.folder, given.add, given.wheel)
    print(f"{given.folder}: {size / 2**20:.1f} MiB; there run: sh {SCRIPT} python3 scripts/gpu.py run")
    return 0


def parser() -> ArgumentParser:
    """Of the command line."""
    whole = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    commands = whole.add_subparsers(required=True)
    folder = ArgumentParser(add_help=False)
    folder.add_argument("--out", type=Path, default=Path("outputs/gpu"), help="folder of the results")
    which = ArgumentParser(add_help=False, parents=[folder])
    which.add_argument("names", nargs="*", help=f"steps or groups ({GROUPS}); default: all")
    which.add_argument("--tiny", action="store_true", help="at a tiny size on a CPU, to try it")
    listing = commands.add_parser("list", parents=[which], help="what there is to measure, and what is done")
    listing.add_argument("--commands", action="store_true", help="with the command of each step")
    listing.set_defaults(body=list_steps)
    running = commands.add_parser("run", parents=[which], help="measure what there is time for")
    running.add_argument("--minutes", type=float, help="leave out steps that would take longer than is left")
    running.add_argument("--again", action="store_true", help="also steps that are done")
    running.set_defaults(body=run_steps)
    paging = commands.add_parser("page", parents=[folder], help="write the page of the results in the folder")
    paging.set_defaults(body=write_page)
    packing = commands.add_parser("pack", help="a folder that runs on a machine without a network")
    packing.add_argument("folder", type=Path)
    packing.add_argument("--add", action="append", default=[], help="wheel of one more installed package")
    packing.add_argument(
        "--wheel",
        action="append",
        default=[],
        type=Path,
        help="a wheel file, in place of the one that would be made",
    )
    packing.set_defaults(body=pack_folder)
    return whole


def main(words: list[str] | None = None) -> int:
    """Run a command; 2 after a mistake of the user's, which is one line."""
    given = parser().parse_args(words)
    try:
        return given.body(given)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    raise SystemExit(main())
