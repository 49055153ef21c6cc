"""Mirror of a store's files at a URL shared by several machines, through fsspec."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from pathlib import Path
from typing import Any

import fsspec

from decode.errors import UserError
from distill.rollouts.shard import is_whole
from distill.utils.atomic_files import parse_json
from drafters.checkpoint.atomic import publish

# Object stores write atomically; other file systems need a temporary name and a rename.
OBJECTS = {"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "oss", "oci", "memory"}


class Mirror:
    """Files below a URL.

    Args:
        url: such as s3://bucket/folder, hdfs://host/folder or file:///folder.

    Raises:
        UserError: unsupported or unreachable URL.
    """

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        try:
            self.fs, self.root = fsspec.core.url_to_fs(self.url)
            kinds = self.fs.protocol
            self.objects = not OBJECTS.isdisjoint([kinds] if isinstance(kinds, str) else kinds)
            if not self.objects:  # object stores have no folders
                self.fs.makedirs(self.root, exist_ok=True)
        except ImportError as error:  # its message names the missing package
            raise UserError(f"rollout.store={url}: {error}; pip install it and try again") from None
        except (ValueError, OSError) as error:
            raise UserError(f"rollout.store={url}: {' '.join(str(error).split())}") from None

    def path(self, name: str) -> str:
        """Path of a file on the remote file system."""
        return f"{self.root}/{name}"

    def names(self) -> set[str]:
        """Names of all existing files."""
        self.fs.invalidate_cache()
        try:
            return {path.rpartition("/")[2] for path in self.fs.ls(self.root, detail=False)}
        except FileNotFoundError:
            return set()  # an object store has no empty folders

    def has(self, name: str) -> bool:
        """Whether a file exists."""
        self.fs.invalidate_cache(self.root)
        return self.fs.exists(self.path(name))

    def put(self, file: Path) -> bool:
        """Upload a file; returns False and changes nothing if a file of that name exists."""
        if self.has(file.name):
            return False
        if self.objects:
            self.fs.put_file(str(file), self.path(file.name))
            return True
        temporary = self.path(f"{file.name}.{socket.gethostname()}-{os.getpid()}.tmp")
        self.fs.put_file(str(file), temporary)
        if not self.has(file.name):
            with suppress(FileNotFoundError):  # removed by `clean`: the store is complete
                self.fs.mv(temporary, self.path(file.name))
                return True
        self._remove(temporary)
        return False

    def get(self, name: str, file: Path) -> None:
        """Download a file."""
        with publish(file) as temporary:
            self.fs.get_file(self.path(name), str(temporary))

    def fetch_shard(self, file: Path, key: str, shard: int) -> None:
        """Download a shard and check its hash.

        Raises:
            UserError: its content has changed.
        """
        with publish(file) as temporary:
            self.fs.get_file(self.path(file.name), str(temporary))
            if not is_whole(temporary, key, shard):
                raise UserError(
                    f"{self.url}/{file.name}: not what was written there (sha256); delete it to have it "
                    "made again"
                )

    def read_json(self, name: str) -> dict[str, Any]:
        """Read plan.json or manifest.json.

        Raises:
            UserError: the file is damaged.
        """
        try:
            return parse_json(self.fs.cat_file(self.path(name)))
        except ValueError as error:
            raise UserError(
                f"{self.url}/{name}: damaged ({error}); remove it to have it written again"
            ) from None

    def clean(self) -> None:
        """Remove temporary files of killed writers, once all files exist."""
        for name in self.names():
            if name.endswith(".tmp"):
                self._remove(self.path(name))

    def _remove(self, path: str) -> None:
        with suppress(FileNotFoundError):
            self.fs.rm_file(path)
