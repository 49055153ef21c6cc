"""Train a small chat model on a folder of text: python scripts/train_target.py data=<folder> out=<folder>."""

from pathlib import Path

from distill.cli.main import main

if __name__ == "__main__":
    from train_target.train import pretrain

    main(pretrain, Path(__file__).resolve().parents[1] / "conf", "train_target")
