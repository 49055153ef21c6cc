"""Export of a checkpoint to other programs and to the Hub."""
