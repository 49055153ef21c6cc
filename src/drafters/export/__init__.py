"""Convert drafters to and from other programs' files: tensor names and configs."""
