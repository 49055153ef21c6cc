"""python train.py drafter=eagle: `foredraft train` in a clone."""

import sys

from foredraft.cli import run

if __name__ == "__main__":
    run("train", sys.argv[1:])
