"""From a composed configuration to objects: validation, target, chat template, help."""
