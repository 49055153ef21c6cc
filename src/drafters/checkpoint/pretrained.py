"""Load, save and upload drafter folders with weights, config, scorecard, recipe and model card."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from decode.errors import UserError
from decode.evaluation.scorecard import Scorecard
from decode.model.identity.fingerprint import module_fingerprint
from decode.model.load import load_target
from decode.model.target import Target
from drafters.base import Drafter, Origin
from drafters.checkpoint import io as checkpoint_io
from drafters.checkpoint import passport
from drafters.checkpoint.atomic import publish
from drafters.checkpoint.folder import target_name, target_origin
from drafters.checkpoint.model_card import Facts, model_card, portable
from drafters.export.layout import Layout
from drafters.hub import NOTES, RECIPE, SCORECARD
from drafters.hub.untrusted_files import in_hub_cache, is_hub_id, read_json
from drafters.hub.upload import upload
from drafters.registry import short_name

SCORES = (SCORECARD, "score.json")  # name in a published folder, and in a run's checkpoint


def from_pretrained(source: str | Path, target: Target | None = None, revision: str | None = None) -> Drafter:
    """Load a drafter from a folder or the Hub, frozen, in the target's dtype.

    Args:
        source: folder or hub id. Remote code is never run.
        target: None: load the target and revision that the config names, without remote code.
        revision: of a hub id; None: the newest.

    Raises:
        UserError: see `fetch` and `load` of `drafters.checkpoint.io`; the target cannot be loaded.
    """
    folder = checkpoint_io.fetch(str(source), revision)
    return checkpoint_io.load(folder, target or _named_target(folder))


def _named_target(folder: Path) -> Target:
    """Load the target that a checkpoint names, at the revision it was trained for."""
    name, origin = target_name(folder), target_origin(folder)
    if in_hub_cache(folder) and not is_hub_id(name):
        raise UserError(f"{folder}: made for {name!r}, which is no hub id; load that target and pass target=")
    name = _bundled(name)
    target = load_target(name, revision=origin.revision)
    tokenizer = checkpoint_io.tokenizer_hash(name, origin.revision, fetch=True)
    if origin.tokenizer and tokenizer != origin.tokenizer:
        raise UserError(
            f"{folder}: the tokenizer of {name} has changed; to use it anyway, load it and pass target="
        )
    return target


def _bundled(name: str) -> str:
    """Path of a target that is shipped with the project (`data/pocket`), in any working directory."""
    source = Path(__file__).resolve().parents[2]  # src/ of a clone, site-packages of a wheel
    shipped = [root / name for root in (source / "foredraft", source.parent)]
    if not is_hub_id(name) or Path(name).exists():
        return name
    return next((str(path) for path in shipped if (path / "config.json").is_file()), name)


def save_pretrained(drafter: Drafter, folder: str | Path, target: Target | None = None) -> None:
    """Write a folder for `from_pretrained`, with a model card and the scorecard if there is one.

    Args:
        drafter: to save.
        folder: new or empty.
        target: of the drafter; None: the target that it was loaded with.

    Raises:
        UserError: the target is unknown, or the folder is not empty.
    """
    with publish_folder(Path(folder)) as temporary:
        write(drafter, temporary, _origin(drafter, target))


def push_to_hub(drafter: Drafter, repo: str, target: Target | None = None, private: bool = True) -> str:
    """Upload the folder of `save_pretrained` in one commit.

    Args:
        drafter: to upload.
        repo: owner/name; created if it does not exist.
        target: as in `save_pretrained`.
        private: visibility of a new repository.

    Returns:
        URL of the commit.

    Raises:
        UserError: the target is unknown; no token, or a token without write access.
        RemoteError: the Hub is unreachable, or the upload failed; nothing is committed.
    """
    origin = portable(_origin(drafter, target))
    with tempfile.TemporaryDirectory() as folder:
        write(drafter, Path(folder), origin, repo=repo)
        return upload(Path(folder), repo, private)


def write(
    drafter: Drafter,
    folder: Path,
    origin: Origin,
    recipe: Mapping[str, Any] | None = None,
    layout: Layout | None = None,
    to: str = "native",
    weights: Mapping[str, Tensor] | None = None,
    repo: str = "",
) -> None:
    """Write weights, config, scorecard, recipe and model card into an existing folder.

    Args:
        drafter: to write.
        folder: to write into.
        origin: the drafter's target and source folder; scorecard and recipe are copied from the folder if
            the weights are unchanged.
        recipe: recipe of the run; None: the source folder's.
        layout: exported files in another format; None: the native format.
        to: name of that format.
        weights: see `checkpoint.io.save`.
        repo: hub repository, for the model card.
    """
    if layout:
        layout.write(folder)
    else:
        checkpoint_io.save(drafter, origin, folder, weights=weights)
    unchanged = origin.folder if origin.content and origin.content == module_fingerprint(drafter) else None
    score, recipe = scorecard(unchanged), recipe or read_notes(unchanged, RECIPE)
    if score:
        score = replace(score, checkpoint=replace(score.checkpoint, target=origin.name))
    for name, value in zip(NOTES, (score and score.to_json(), recipe), strict=True):
        if value is not None:
            (folder / name).write_text(json.dumps(value, indent=1, sort_keys=True) + "\n")
    facts = Facts(drafter, short_name(drafter), origin, score, recipe, to, layout, repo)
    (folder / "README.md").write_text(model_card(facts))
    if score:
        passport.write(folder, score, short_name(drafter), origin, repo)


def scorecard(folder: Path | None) -> Scorecard | None:
    """Scorecard in a folder, without sample texts; None if there is none.

    Raises:
        UserError: a damaged scorecard, or one of another version.
    """
    for name in SCORES:
        if (values := read_notes(folder, name)) is not None:
            return replace(Scorecard.from_json(values, f"{folder}/{name}"), samples=[])
    return None


def read_notes(folder: Path | None, name: str) -> dict[str, Any] | None:
    """Read a JSON object from a checkpoint folder; None if there is no such file.

    Raises:
        UserError: the file is not a JSON object.
    """
    if folder is None or not (folder / name).is_file():
        return None
    try:
        content = read_json(folder / name)
    except ValueError as error:
        raise UserError(f"{folder / name}: damaged ({error})") from None
    if not isinstance(content, dict):
        raise UserError(f"{folder / name}: damaged (no object)")
    return content


def _origin(drafter: Drafter, target: Target | None) -> Origin:
    origin = drafter.origin
    if target is None:
        if origin is None:
            raise UserError("this drafter's target is unknown; pass target=")
        return origin
    if origin and origin.fingerprint == target.fingerprint():
        return origin
    return checkpoint_io.origin_of(drafter, target)


@contextmanager
def publish_folder(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder, and rename it to `folder` on success.

    Raises:
        UserError: `folder` is not empty.
        OSError: writing failed; the temporary folder is removed.
    """
    if folder.is_file() or (folder.is_dir() and any(folder.iterdir())):
        raise UserError(f"{folder} already exists; remove it, or choose another folder")
    if file := next((parent for parent in folder.parents if parent.is_file()), None):
        raise UserError(f"{folder}: {file} is a file; choose another folder")
    with publish(folder) as temporary:
        temporary.mkdir(parents=True)
        yield temporary
