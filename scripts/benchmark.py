"""Time things against one another: python scripts/benchmark.py <word> [overrides]; see WORDS."""

import sys
from importlib import import_module

from distill.cli.main import main
from distill.utils.paths import CONF

# what is measured -> what measures it; its configuration is conf/benchmark_<word>.yaml
WORDS = {
    "auto": "benchmarks.auto_regret:auto_regret",
    "decode": "benchmarks.decode:decoders",
    "batch": "benchmarks.batch_context:batch_sizes",
    "context": "benchmarks.batch_context:context_lengths",
    "lyanna": "benchmarks.lyanna_ablation:lyanna",
    "regret": "benchmarks.regret:regrets",
    "rollout": "benchmarks.rollout:rollouts",
    "scaling": "benchmarks.scaling:scaling",
    "train": "benchmarks.train_step.race:training",
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
