"""Exceptions that the command line prints as one line, without a traceback."""


class UserError(ValueError):
    """Invalid input or configuration; exit code 2."""


class TooLargeError(RuntimeError):
    """A run does not fit on the machine; exit code 1."""


class FollowUpError(RuntimeError):
    """A run completed, but a following step such as an export failed; exit code 1."""


class RemoteError(RuntimeError):
    """A remote service failed; exit code 1."""
