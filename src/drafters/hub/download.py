"""What is fetched from the Hub, and in one line why it could not be."""

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

NOTES = ("scorecard.json", "recipe.json")  # how a drafter was scored and made


def snapshot(source: str, revision: str | None, files: Sequence[str]) -> Path:
    """The folder in huggingface_hub's cache that has these files of a repository, those that it has.

    Raises:
        UserError: no such repository, or one that is not open to this user.
        RemoteError: the Hub cannot be reached, or was cut off.
    """
    try:
        return Path(snapshot_download(source, revision=revision, allow_patterns=list(files)))
    except GatedRepoError:
        why = "gated: accept its terms on the Hub, and log in with `hf auth login`"
    except RevisionNotFoundError:
        why = f"it has no revision {revision!r}"
    except RepositoryNotFoundError:
        why = "none of that name, or a private one that this login (`hf auth whoami`) may not read"
    except HFValidationError:
        why = "an id is owner/name"
    except LocalEntryNotFoundError:
        raise RemoteError(f"{source}: the Hub cannot be reached, and nothing was fetched before") from None
    except HfHubHTTPError as error:
        why = f"it answers {error.response.status_code}"
    except OSError as error:
        if error.errno is not None and error.filename is not None:
            raise  # of this machine's disk
        why = brief(error)
    except Exception as error:  # which HTTP library the client has differs from version to version
        raise RemoteError(f"{source}: the connection was cut off ({type(error).__name__})") from None
    raise UserError(f"{source}: no such folder, and not to be had from the hub ({why})")
