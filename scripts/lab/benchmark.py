"""Run a benchmark: python scripts/lab/benchmark.py <name> [overrides]; names are in BENCHMARKS."""

import sys
from importlib import import_module

from distill.cli.main import main
from distill.utils.paths import CONF

# name -> module:function; its configuration is conf/lab/<name>.yaml
BENCHMARKS = {
    "auto": "benchmarks.auto_regret:auto_regret",
    "decode": "benchmarks.decode:decoders",
    "batch": "benchmarks.batch_context:batch_sizes",
    "blocks": "benchmarks.drafter_table.main:drafters",
    "budget": "benchmarks.drafter_table.main:drafters",
    "context": "benchmarks.batch_context:context_lengths",
    "attention": "benchmarks.gpu.attention:attention",
    "distillspec": "benchmarks.drafter_table.main:drafters",
    "drafters": "benchmarks.drafter_table.main:drafters",
    "field": "benchmarks.gpu.training:field",
    "fit": "benchmarks.gpu.training:fit",
    "lossy": "benchmarks.lossy:curves",
    "lyanna": "benchmarks.lyanna_ablation:lyanna",
    "objectives": "benchmarks.drafter_table.main:drafters",
    "regret": "benchmarks.regret:regrets",
    "rollout": "benchmarks.rollout:rollouts",
    "rounds": "benchmarks.gpu.rounds:rounds",
    "scale": "benchmarks.scale:scale",
    "scaling": "benchmarks.scaling:scaling",
    "smollm2": "benchmarks.drafter_table.main:drafters",
    "step": "benchmarks.gpu.step:training_step",
    "step_counts": "benchmarks.gpu.step_counts:step_counts",
    "sweep": "benchmarks.drafter_table.main:drafters",
    "tests": "benchmarks.gpu.marked_tests:marked",
    "train": "benchmarks.train_step.race:training",
    "waiting": "benchmarks.waiting:waiting",
}


def run() -> None:
    """Run the benchmark named by the first argument; the rest are overrides of its configuration."""
    name = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if name in ("-h", "--help"):
        print(__doc__, "", *BENCHMARKS, sep="\n")
        return
    if name not in BENCHMARKS:
        print(f"error: benchmark {name}: choose one of {', '.join(BENCHMARKS)}", file=sys.stderr)
        raise SystemExit(2)
    module, _, function = BENCHMARKS[name].partition(":")
    del sys.argv[1]
    main(getattr(import_module(module), function), CONF, f"lab/{name}")


if __name__ == "__main__":
    run()
