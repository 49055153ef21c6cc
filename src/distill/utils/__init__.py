"""Run folder, atomic files, progress, provenance, redaction."""
