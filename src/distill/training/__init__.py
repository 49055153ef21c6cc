"""LightningModule, optimizers, trainer, strategies, checkpointing and callbacks."""
