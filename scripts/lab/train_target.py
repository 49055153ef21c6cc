"""Train a small chat model on a folder of text: train_target.py data=<folder> out=<folder>."""

from distill.cli.main import main
from distill.utils.paths import CONF

if __name__ == "__main__":
    from train_target.train import pretrain

    main(pretrain, CONF, "lab/train_target")
