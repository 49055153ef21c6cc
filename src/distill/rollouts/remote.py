"""A store's files at a url that several machines see; see fsspec for the kinds of urls."""

from __future__ import annotations

import json
import os
import socket
from contextlib import suppress
from pathlib import Path
from typing import Any

import fsspec

from decode.errors import UserError
from distill.rollouts.shard import is_whole
from drafters.checkpoint.atomic import publish

# Where an object appears whole or not at all; elsewhere a file is written aside and renamed.
OBJECTS = {"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "oss", "oci", "memory"}


class Mirror:
    """Files by name below a url.

    Args:
        url: such as s3://bucket/folder, hdfs://host/folder or file:///folder.

    Raises:
        UserError: nothing here can read such a url, or nothing answers there.
    """

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        try:
            self.fs, self.root = fsspec.core.url_to_fs(self.url)
            kinds = self.fs.protocol
            self.objects = not OBJECTS.isdisjoint([kinds] if isinstance(kinds, str) else kinds)
            if not self.objects:  # which have no folders
                self.fs.makedirs(self.root, exist_ok=True)
        except ImportError as error:  # its text names the package
            raise UserError(f"rollout.store={url}: {error}; pip install it and try again") from None
        except (ValueError, OSError) as error:
            raise UserError(f"rollout.store={url}: {' '.join(str(error).split())}") from None

    def path(self, name: str) -> str:
        """Of a file, as its file system calls it."""
        return f"{self.root}/{name}"

    def names(self) -> set[str]:
        """Of all files that are there now."""
        self.fs.invalidate_cache()
        try:
            return {found.rpartition("/")[2] for found in self.fs.ls(self.root, detail=False)}
        except FileNotFoundError:
            return set()  # an object store has no empty folders

    def put(self, file: Path) -> bool:
        """Upload a file under its name; False where another was faster, whose file stays."""
        if file.name in self.names():
            return False
        if self.objects:
            self.fs.put_file(str(file), self.path(file.name))
            return True
        aside = self.path(f"{file.name}.{socket.gethostname()}-{os.getpid()}.tmp")
        self.fs.put_file(str(file), aside)
        if file.name not in self.names():
            with suppress(FileNotFoundError):  # cleaned away: the store is complete
                self.fs.mv(aside, self.path(file.name))
                return True
        self._remove(aside)
        return False

    def get(self, name: str, file: Path) -> None:
        """Download a file."""
        with publish(file) as temporary:
            self.fs.get_file(self.path(name), str(temporary))

    def fetch_shard(self, file: Path, key: str, shard: int) -> None:
        """Download a shard, if it is what was written.

        Raises:
            UserError: it is not.
        """
        with publish(file) as temporary:
            self.fs.get_file(self.path(file.name), str(temporary))
            if not is_whole(temporary, key, shard):
                raise UserError(
                    f"{self.url}/{file.name}: not what was written there (sha256); delete it to have it "
                    "made again"
                )

    def read_json(self, name: str) -> dict[str, Any]:
        """Content of a small file."""
        return json.loads(self.fs.cat_file(self.path(name)))

    def clean(self) -> None:
        """Remove what killed writers left, once every file is there."""
        for name in self.names():
            if name.endswith(".tmp"):
                self._remove(self.path(name))

    def _remove(self, path: str) -> None:
        with suppress(FileNotFoundError):
            self.fs.rm_file(path)
