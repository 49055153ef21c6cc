"""Time things against one another: python scripts/benchmark.py decode [overrides]."""

import sys
from pathlib import Path

from distill.cli import main

CONF = Path(__file__).resolve().parents[1] / "conf"
WORDS = {
    "decode": "decoders"
}  # what is measured -> the function in distill.benchmark; conf/benchmark_<word>.yaml


def run() -> None:
    """Dispatch on the first word; the rest are overrides of its configuration."""
    word = sys.argv[1] if len(sys.argv) > 1 else ""
    if word not in WORDS:
        print(f"error: benchmark {word}: choose one of {', '.join(WORDS)}", file=sys.stderr)
        raise SystemExit(2)
    from distill import benchmark

    del sys.argv[1]
    main(getattr(benchmark, WORDS[word]), CONF, f"benchmark_{word}")


if __name__ == "__main__":
    run()
