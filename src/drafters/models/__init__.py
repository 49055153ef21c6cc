"""One drafter architecture per file."""
