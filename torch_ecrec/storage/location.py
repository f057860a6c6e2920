"""A place where checkpoints are kept: any URL that fsspec knows, a local folder first of all.

What is written is there as a whole or not at all. A local file has a temporary name until it is synced, then it is
renamed, and its folder is synced, so that it survives the end of power. An object store shows an object when it is
closed. Names are relative to the place, with "/" between folders.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import fsspec
from fsspec.core import url_to_fs

from torch_ecrec.errors import CheckpointError

TEMPORARY = ".part"  # behind the name of a local file that is being written


@contextlib.contextmanager
def _named(what: str) -> Iterator[None]:
    """Whatever goes wrong within is a CheckpointError that says what was being done."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:  # stores raise errors of their own kinds
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error) or repr(error)
        raise CheckpointError(f"{what}: {reason}") from error


class Location:
    """Reads and writes below a URL.

    Args:
        url: a folder, or any URL that fsspec knows, say "s3://bucket/folder".

    Raises:
        CheckpointError: there is no such kind of place, or what it needs is not installed.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        with _named(f"checkpoints at {url}"):
            fs, root = url_to_fs(url)
        self._fs: fsspec.AbstractFileSystem = fs
        self._root = str(root).rstrip("/")
        self._local = "file" in (fs.protocol if isinstance(fs.protocol, tuple) else (fs.protocol,))

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}" if name else self._root

    @contextlib.contextmanager
    def writing(self, name: str) -> Iterator[IO[bytes]]:
        """A file to write to. It is there, and durable, once this ends without an error; else it is not there.

        Raises:
            CheckpointError: it cannot be written.
        """
        with _named(f"writing {self.url}/{name}"):
            if self._local:
                with self._writing_locally(Path(self._path(name))) as file:
                    yield file
                return
            file = self._fs.open(self._path(name), "wb")
            try:
                yield file
            except BaseException:
                with contextlib.suppress(Exception):  # what is left of it is nothing that anybody looks at
                    file.discard()
                raise
            file.close()

    @contextlib.contextmanager
    def _writing_locally(self, path: Path) -> Iterator[IO[bytes]]:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(path.name + TEMPORARY)
        try:
            with open(temporary, "wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise
        for folder in (path.parent, path.parent.parent):
            _sync_folder(folder)

    def read(self, name: str) -> bytes:
        """All of a file. Raises CheckpointError: it is not there, or cannot be read."""
        with _named(f"reading {self.url}/{name}"):
            found: bytes = self._fs.cat_file(self._path(name))
            return found

    @contextlib.contextmanager
    def reading(self, name: str) -> Iterator[IO[bytes]]:
        """A file to read from. Raises CheckpointError: it is not there, or cannot be read."""
        with _named(f"reading {self.url}/{name}"), self._fs.open(self._path(name), "rb") as file:
            yield file

    def names(self, folder: str = "") -> list[str]:
        """What is in a folder, in order; nothing where there is no such folder. Raises CheckpointError."""
        with _named(f"looking into {self.url}/{folder}"):
            self._fs.invalidate_cache()
            try:
                found: list[Any] = self._fs.ls(self._path(folder), detail=False)
            except FileNotFoundError:
                return []
            return sorted(str(path).rstrip("/").rsplit("/", 1)[-1] for path in found)

    def remove(self, folder: str) -> None:
        """A folder with all that is in it; nothing if it is not there. Raises CheckpointError."""
        with _named(f"removing {self.url}/{folder}"), contextlib.suppress(FileNotFoundError):
            self._fs.rm(self._path(folder), recursive=True)

    def remove_file(self, name: str) -> None:
        """A file; nothing if it is not there. Raises CheckpointError."""
        with _named(f"removing {self.url}/{name}"), contextlib.suppress(FileNotFoundError):
            self._fs.rm_file(self._path(name))


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
