"""python train.py drafter=eagle -- compose the configuration and run it. No logic lives here."""

from pathlib import Path

from distill.cli import main

if __name__ == "__main__":
    from distill.run import run

    main(run, Path(__file__).parent / "conf")
