"""Exceptions whose text is all that is shown."""


class UserError(ValueError):
    """A mistake in what the user asked for; its text is the single line that is shown (exit 2)."""


class TooLargeError(RuntimeError):
    """A run that is too large for its machine; its text is the single line that is shown (exit 1)."""


class RemoteError(RuntimeError):
    """A service elsewhere that failed; its text is the single line that is shown (exit 1)."""
