"""Run folders, atomic files, progress, provenance, redaction."""
