"""Files of a model: of a folder, or of a hub repository, which are fetched when they are asked for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from huggingface_hub import hf_hub_download, try_to_load_from_cache
from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

from decode.errors import UserError

CONFIG, GENERATION = "config.json", "generation_config.json"
ADAPTER = "adapter_config.json"
ADAPTER_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")


def is_file_name(value: object) -> bool:
    """Whether a value names a file of a folder, rather than one elsewhere or a folder."""
    return isinstance(value, str) and value not in ("", "..") and Path(value).name == value


class ModelFiles:
    """Files of a folder or a hub repository.

    Args:
        source: a folder, or a hub id.
        revision: of a hub id.
        name: option and value that named it, as in `target=folder`, for errors.
        fetch: ask the hub for files that are not in the cache.
    """

    def __init__(self, source: str | Path, revision: str | None, name: str, fetch: bool = True) -> None:
        self.source, self.revision, self.name, self.fetch = source, revision, name, fetch

    def path(self, file: str, needed: bool = False) -> Path | None:
        """Path of a file; None if there is none, or offline if it is not in the cache.

        Args:
            file: its name.
            needed: a file that is not in the cache is an error.

        Raises:
            UserError: the hub cannot be read, or it has not been fetched and is needed.
        """
        if isinstance(self.source, Path):
            path = self.source / file
            return path if path.is_file() else None
        try:
            return Path(
                hf_hub_download(self.source, file, revision=self.revision, local_files_only=not self.fetch)
            )
        except LocalEntryNotFoundError as error:
            if needed:
                raise UserError(f"{self.name}: {file} is not in the cache ({error})") from None
            return None
        except EntryNotFoundError:
            return None
        except OSError as error:
            raise UserError(f"{self.name}: {str(error).splitlines()[0]}") from None

    def names(self) -> list[str]:
        """Names of the files that are on this machine, without folders in the folder."""
        folder = self.folder()
        return sorted(path.name for path in folder.iterdir() if path.is_file()) if folder else []

    def folder(self) -> Path | None:
        """The folder on this machine; None for a repository of which nothing was fetched."""
        if isinstance(self.source, Path):
            return self.source
        cached = try_to_load_from_cache(self.source, CONFIG, revision=self.revision)
        return Path(cached).parent if isinstance(cached, str) else None

    def read(self, file: str) -> dict[str, Any]:
        """Values of a JSON file; empty if there is no such file.

        Raises:
            UserError: it is no JSON object.
        """
        path = self.path(file)
        if path is None:
            return {}
        try:
            values = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_once)
        except (OSError, ValueError) as error:
            raise UserError(f"{self.name}: {file} is not a valid JSON file ({error})") from None
        if not isinstance(values, dict):
            raise UserError(f"{self.name}: {file} is not a valid JSON file (no object)")
        return values

    def check_adapter(self) -> None:
        """Refuse files of an adapter: transformers applies it to the weights, engines do not.

        Raises:
            UserError: there is an adapter; one line names the ways out.
        """
        weights = next((file for file in ADAPTER_WEIGHTS if file in self.names()), "")
        if not weights and self.path(ADAPTER) is None:
            return
        if self.path(CONFIG) is None:
            base = self.read(ADAPTER).get("base_model_name_or_path") or "its base model"
            raise UserError(
                f"{self.name}: an adapter without its model; merge it into {base} "
                "(peft: merge_and_unload, then save_pretrained) and give the merged folder"
            )
        raise UserError(
            f"{self.name}: it has weights and an adapter ({weights or ADAPTER}), which would be applied to "
            "them; if they are merged already, remove the adapter's files; else merge it (peft: "
            "merge_and_unload, then save_pretrained into another folder)"
        )


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON whose keys stand once: readers differ in which value they take.

    Raises:
        ValueError: a key stands twice.
    """
    values = dict(pairs)
    if len(values) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"the key {next(key for key in keys if keys.count(key) > 1)!r} stands twice in it")
    return values
