"""The one exception that means "the user can mend this"."""


class UserError(ValueError):
    """A mistake in what the user asked for; its text is the single line that is shown (exit 2)."""
