"""Upload a folder to the Hub in one commit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, constants, get_token
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.utils import disable_progress_bars

from decode.errors import RemoteError, UserError
from drafters.hub import NOTES, PASSPORT, PASSPORT_PAGE
from drafters.hub.untrusted_files import brief, check_link, is_hub_id

# Files that we write; the upload deletes the repository's copies of files missing from the folder.
OURS = (
    "config.json",
    "model.safetensors",
    "adapter_config.json",
    "adapter_model.safetensors",
    "medusa_lm_head.pt",
    "token_map.pt",
    "drafter.gguf",
    *NOTES,
    PASSPORT,
    PASSPORT_PAGE,
)
LOGIN = "log in with `hf auth login`, or set HF_TOKEN to a token that may write"


def check_repo(repo: str) -> None:
    """Check the name of a repository, before work for the upload begins.

    Raises:
        UserError: it is not owner/name.
    """
    if not is_hub_id(str(repo)):
        raise UserError(f"push_to={brief(repo)}: give owner/name, of letters, digits, '-', '_' and '.'")


def logged_in() -> bool:
    """Whether a token exists, valid or not."""
    return bool(get_token())


def files_of(folder: Path) -> list[Path]:
    """Files to upload.

    Raises:
        UserError: a link to a file outside the folder.
    """
    return sorted(check_link(path) for path in folder.iterdir() if path.is_file())


def plan(folder: Path, repo: str, private: bool) -> str:
    """Description of an upload."""
    lines = [f"  {path.name}  {path.stat().st_size:,} bytes" for path in files_of(folder)]
    kind = "private" if private else "public"
    where = f"{constants.ENDPOINT}/{repo} ({kind}, if it has to be created), in one commit"
    return "\n".join([f"would upload to {where}:", *lines])


def upload(folder: Path, repo: str, private: bool = True) -> str:
    """Create the repository if needed, and commit all files of the folder at once.

    Args:
        folder: its files are uploaded, without subfolders.
        repo: owner/name.
        private: visibility of a new repository; an existing one is not changed.

    Returns:
        URL of the commit.

    Raises:
        UserError: an invalid name; no token, or a token without write access.
        RemoteError: the Hub is unreachable or fails; the call can be repeated.
    """
    check_repo(repo)
    names = [path.name for path in files_of(folder)]
    if not logged_in():
        raise UserError(f"push_to={repo}: no token of the Hub is known here; {LOGIN}")
    api = HfApi()
    disable_progress_bars()
    _call(repo, api.create_repo, repo, private=private, exist_ok=True)
    commit = _call(
        repo,
        api.upload_folder,
        repo_id=repo,
        folder_path=folder,
        allow_patterns=names,
        delete_patterns=[name for name in OURS if name not in names],
        commit_message="Upload drafter",
    )
    return str(commit.commit_url)


def _call(repo: str, call: Any, *arguments: Any, **options: Any) -> Any:
    """Call the client; failures become one-line errors without contents of the request."""
    try:
        return call(*arguments, **options)
    except HfHubHTTPError as error:
        code = error.response.status_code
        if code == 401:
            raise UserError(f"push_to={repo}: the Hub does not know this token (401); {LOGIN}") from None
        if code in (403, 404):
            raise UserError(
                f"push_to={repo}: this token may not write there ({code}); choose another repository, or "
                "another token"
            ) from None
        if code == 400:
            raise UserError(f"push_to={repo}: the Hub refuses it ({brief(error.server_message)})") from None
        raise RemoteError(f"push_to={repo}: the Hub answers {code}; nothing was committed") from None
    except ValueError as error:  # invalid front matter of the model card, or an invalid name
        raise UserError(f"push_to={repo}: {brief(error)}") from None
    except Exception as error:  # the client's HTTP library and its exceptions depend on the version
        raise RemoteError(
            f"push_to={repo}: no connection, or it was cut off ({type(error).__name__}); the commit "
            "is all or nothing, so repeat the command"
        ) from None
