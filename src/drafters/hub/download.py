"""Download a drafter's files from the Hub, with one-line errors."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from decode.errors import RemoteError, UserError
from drafters.hub.untrusted_files import brief


def snapshot(source: str, revision: str | None, files: Sequence[str]) -> Path:
    """Download the `files` that a repository has; returns the folder in huggingface_hub's cache.

    Raises:
        UserError: no such repository, or no access.
        RemoteError: the Hub is unreachable, or the download failed.
    """
    try:
        return Path(snapshot_download(source, revision=revision, allow_patterns=list(files)))
    except GatedRepoError:
        reason = "gated: accept its terms on the Hub, and log in with `hf auth login`"
    except RevisionNotFoundError:
        reason = f"it has no revision {revision!r}"
    except RepositoryNotFoundError:
        reason = "no such repository, or a private one that this login (`hf auth whoami`) may not read"
    except HFValidationError:
        reason = "an id is owner/name"
    except LocalEntryNotFoundError:
        raise RemoteError(f"{source}: the Hub cannot be reached, and the cache has no copy") from None
    except HfHubHTTPError as error:
        reason = f"it answers {error.response.status_code}"
    except OSError as error:
        if error.errno is not None and error.filename is not None:
            raise  # an error of the local disk
        reason = brief(error)
    except Exception as error:  # the client's HTTP library and its exceptions depend on the version
        raise RemoteError(f"{source}: the connection was cut off ({type(error).__name__})") from None
    raise UserError(f"{source}: no such folder, and not available from the Hub ({reason})")
