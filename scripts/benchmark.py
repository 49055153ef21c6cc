"""Time things against one another: python scripts/benchmark.py <word> [overrides]; see WORDS."""

import sys
from importlib import import_module
from pathlib import Path

from distill.cli import main

CONF = Path(__file__).resolve().parents[1] / "conf"
# what is measured -> what measures it; its configuration is conf/benchmark_<word>.yaml
WORDS = {
    "auto": "distill.auto_regret:auto_regret",
    "decode": "distill.benchmark:decoders",
    "batch": "distill.sweeps:batch_sizes",
    "context": "distill.sweeps:context_lengths",
    "regret": "distill.regret:regrets",
    "rollout": "distill.rollout_race:rollouts",
    "scaling": "distill.scaling:scaling",
    "train": "distill.step_race:training",
}


def run() -> None:
    """Dispatch on the first word; the rest are overrides of its configuration."""
    word = sys.argv[1] if len(sys.argv) > 1 else ""
    if word not in WORDS:
        print(f"error: benchmark {word}: choose one of {', '.join(WORDS)}", file=sys.stderr)
        raise SystemExit(2)
    module, _, function = WORDS[word].partition(":")
    del sys.argv[1]
    main(getattr(import_module(module), function), CONF, f"benchmark_{word}")


if __name__ == "__main__":
    run()
