"""Files of a model: of a folder, or of a hub repository with files fetched on demand."""

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
    """Whether a value names a file of a folder, not a folder or a path elsewhere."""
    return isinstance(value, str) and value not in ("", "..") and Path(value).name == value


class ModelFiles:
    """Files of a folder or a hub repository.

    Args:
        source: a folder, or a hub id.
        revision: of a hub id.
        name: option and value for errors, such as `target=folder`.
        fetch: ask the hub for files that are not in the cache.
    """

    def __init__(self, source: str | Path, revision: str | None, name: str, fetch: bool = True) -> None:
        self.source, self.revision, self.name, self.fetch = source, revision, name, fetch

    def path(self, file: str, needed: bool = False) -> Path | None:
        """Path of a file; None if it does not exist, or if it is not cached while offline.

        Args:
            file: its name.
            needed: raise if the file is not in the cache.

        Raises:
            UserError: the hub cannot be read, or the file is needed and not in the cache.
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
        """Names of the files on this machine, without subfolders."""
        folder = self.folder()
        return sorted(path.name for path in folder.iterdir() if path.is_file()) if folder else []

    def folder(self) -> Path | None:
        """The folder on this machine; None if nothing of the repository was fetched."""
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
            values = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_unique_keys)
        except (OSError, ValueError) as error:
            raise UserError(f"{self.name}: {file} is not a valid JSON file ({error})") from None
        if not isinstance(values, dict):
            raise UserError(f"{self.name}: {file} is not a valid JSON file (no object)")
        return values

    def check_adapter(self) -> None:
        """Refuse adapter files: transformers would apply the adapter, engines would not.

        Raises:
            UserError: there is an adapter; the message says what to do.
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


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object with unique keys, because readers differ in which duplicate they use.

    Raises:
        ValueError: a key occurs twice.
    """
    values = dict(pairs)
    if len(values) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"the key {next(key for key in keys if keys.count(key) > 1)!r} stands twice in it")
    return values
