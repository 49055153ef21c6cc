"""Turn a composed configuration into objects: validation, target, chat template, help."""
