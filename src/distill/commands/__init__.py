"""Bodies of the commands in scripts/ that are not training, scoring or exporting."""
