"""A place where checkpoints are kept: a folder of this machine, or whatever `fsspec` knows by a URL.

    Location("/data/ckpt")          a local folder, also file:///data/ckpt
    Location("s3://bucket/ckpt")    wants s3fs; gs:// wants gcsfs; memory:// is for tests

Names are relative, with `/` between folders: `000000000200-a1-7/slot-0003.part`.

Invariants
- A file appears whole, under its name, when its writer is closed; one that is abandoned, or whose process dies, never
  does. A local file has a temporary name until then, and so has one in a store that is no object store.
- When `close` returns, a local file survives the loss of power: its bytes are synced, then it is renamed, then its
  folder and that folder's own are. What an object store has acknowledged, it keeps.
- Errors of all file systems are `CheckpointError`, which says what to do and has the error as its cause.

A `Location` has no state: threads may share it. A writer, or a reader, is of one thread.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import shutil
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import fsspec

from torch_ecrec.errors import CheckpointError, StoreUnavailable
from torch_ecrec.runtime.checks import require
from torch_ecrec.runtime.files import sync_folder
from torch_ecrec.storage.direct import DirectFile

# An object appears when it was closed, as a whole. Elsewhere a file can be seen while it grows.
OBJECT_STORES = frozenset({"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "oss", "oci"})

PATTERNS = "*?[]"  # in a path of fsspec
_ADVICE = {
    errno.ENOSPC: "there is no room: free some, or keep fewer checkpoints",
    errno.EDQUOT: "the quota is used up: free some, or keep fewer checkpoints",
    errno.EACCES: "give this user permission there, or name another place",
    errno.EPERM: "give this user permission there, or name another place",
    errno.EROFS: "the file system is read-only: name another place",
    errno.ENOENT: "it is not there: was it removed, or is the URL another one?",
    errno.ENOTDIR: "a file is where a folder is wanted: name another place",
    errno.ELOOP: "a link leads to itself: remove it, or name another place",
    errno.EISDIR: "something else has that name: remove it, or name another place",
    errno.ENXIO: "something else has that name: remove it, or name another place",
    errno.EIO: "the device fails: look at the system's log, and name another place",
}


_FOR_GOOD = {errno.ENOENT, errno.ELOOP, errno.EISDIR, errno.ENXIO}  # however often it is tried
_SCHEME_LOST = re.compile(r"(s3a?|gs|gcs|abfss?|az|oss|oci|hdfs|https?|ftp|memory|file)(:/?[^/:]|:$|/)", re.IGNORECASE)


def is_path(name: str) -> bool:
    """Returns whether a place is named as a path of this machine, and not by a URL."""
    return "://" not in name and "::" not in name


def folder_of(url: str) -> Path | None:
    """Returns the whole path of a place for checkpoints on this machine; None: it is elsewhere."""
    protocol, separator, path = url.partition("://")
    if not is_path(url) and protocol not in ("file", "local"):
        return None
    return Path(os.path.abspath(os.path.expanduser(path if separator else url)))


def require_place(url: str) -> None:
    """Raises ValueError where a place for checkpoints looks like a URL that has lost its scheme, or a part of it: it
    would be taken for a folder of this machine. Likewise where its name is no text: messages and manifests have it."""
    try:
        f"{folder_of(url) or url}".encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"a place for checkpoints must have a name in UTF-8, got {error.object!r}") from None
    if not is_path(url):
        return
    found, path = _SCHEME_LOST.match(url), Path(os.path.expanduser(url))
    if path.is_absolute() or url.startswith(".") or (Path.cwd() / path.parts[0]).exists():
        return
    if found or len(path.parts) > 1:
        scheme, rest = (found[1].lower(), url[len(found[1]) :].strip(":/")) if found else ("s3", url)
        raise ValueError(
            f"{url!r} is no place for checkpoints: a bucket is named with its scheme ({scheme}://{rest}), and a folder"
            f" of this machine by its path ({os.path.abspath(path)}, or ./{url})"
        )


def require_writable(url: str) -> None:
    """Writes a small file there, and removes it. Raises CheckpointError, with what to do, where that cannot be."""
    location, name = Location(url), f".writable-{secrets.token_hex(6)}"
    location.write_whole(name, b"may this place be written?")
    location.remove(name)


class Reader(Protocol):
    """A file that is being read from its beginning: an `OpenFile`, or what `parts.py:_Memory` has read ahead."""

    def read_into(self, memory: Any) -> int:
        """Fills contiguous writable memory; returns how many bytes it got: fewer at the end of the file only."""

    def close(self) -> None:
        """Closes the file, of which nothing more is read."""


def bytes_of(data: Any) -> memoryview:
    """Contiguous memory as a flat view of bytes."""
    view = memoryview(data)
    return view.cast("B") if view.nbytes else memoryview(b"")


class Location:
    """A folder, at a URL.

    Args:
        url: a path, or a URL that fsspec knows. The folder need not be there yet.

    Attributes:
        on_bytes: is told of bytes of files that were read or written, here and in folders that `below` gives from then
            on; on any thread.

    Raises:
        CheckpointError: fsspec does not know it, or lacks the package that does.
    """

    def __init__(self, url: str) -> None:
        require(bool(url), "`url` of a place for checkpoints must not be empty")
        self.on_bytes: Callable[[int], None] = lambda count: None
        self.url = url.rstrip("/") or "/"
        folder = folder_of(url)
        self._store: _Store = _Remote(url) if folder is None else _Local(folder)

    def below(self, folder: str) -> Location:
        """Returns a folder of this one."""
        inner = object.__new__(Location)
        inner.url, inner._store = f"{self.url}/{folder}", self._store.below(folder)
        inner.on_bytes = self.on_bytes
        return inner

    def read(self, name: str) -> bytes:
        """Returns the bytes of a whole file."""
        with self._named(name, "read"):
            return self._store.read(name)

    def read_range(self, name: str, offset: int, count: int) -> bytes:
        """Returns `count` bytes of a file from `offset`; fewer where it ends before."""
        with self._named(name, "read"):
            return self._store.read_range(name, offset, count)

    def open_read(self, name: str) -> OpenFile:
        """Opens a file, to be read from its beginning."""
        with self._named(name, "read"):
            return OpenFile(self, name, self._store.open_read(name))

    def open_write(self, name: str) -> OpenFile:
        """Opens a new file, or one that takes the place of the one of that name once it is closed."""
        with self._named(name, "write"):
            return OpenFile(self, name, self._store.open_write(name))

    def write_whole(self, name: str, data: bytes) -> None:
        """Writes a small file; when this returns it is durable."""
        writer = self.open_write(name)
        try:
            writer.write(data)
            writer.close()
        finally:
            writer.abandon()

    def list(self, folder: str = "") -> list[str]:
        """Names of files and folders in a folder, sorted; none where there is no such folder."""
        with self._named(folder, "list"):
            return sorted(self._store.list(folder))

    def size(self, name: str) -> int:
        """Returns how many bytes a file has."""
        with self._named(name, "look at"):
            return self._store.size(name)

    def exists(self, name: str) -> bool:
        """Returns whether a file or folder of that name is there."""
        with self._named(name, "look for"):
            return self._store.exists(name)

    def remove(self, name: str) -> None:
        """Removes a file, or a folder with all that is in it, for good; one that is not there is no error."""
        with self._named(name, "remove"):
            self._store.remove(name)

    def gone(self, error: CheckpointError, name: str) -> bool:
        """Returns whether reading a file that was there has failed since somebody has removed it meanwhile."""
        return isinstance(error.__cause__, FileNotFoundError) and not self.exists(name)

    def is_link(self, name: str) -> bool:
        """Returns whether a name stands for what lies elsewhere: a symbolic link of this machine."""
        with self._named(name, "look at"):
            return self._store.is_link(name)

    @contextlib.contextmanager
    def _named(self, name: str, action: str) -> Iterator[None]:
        """Errors of the file system, as `CheckpointError` with their cause."""
        try:
            yield
        except CheckpointError:
            raise
        except Exception as error:  # each file system has its own
            at = f"{self.url}/{name}" if name else self.url
            number = error.errno if isinstance(error, OSError) and error.errno else 0
            if isinstance(error, FileNotFoundError):
                number = errno.ENOENT
            elif isinstance(error, PermissionError):
                number = errno.EACCES
            advice = _ADVICE.get(number, "look whether the place can be reached, and may be written")
            said = str(error) or type(error).__name__
            kind = CheckpointError if number in _FOR_GOOD else StoreUnavailable
            raise kind(f"cannot {action} {at}: {said}; {advice}") from error


class OpenFile:
    """A file that is being written, or read from its beginning; a `Reader`. Its errors are told by name."""

    def __init__(self, location: Location, name: str, file: Any) -> None:
        self._location, self._name, self._file = location, name, file

    def write(self, data: Any) -> int:
        """Appends contiguous memory (bytes, a memoryview, an array); returns how many bytes that were."""
        with self._location._named(self._name, "write"):
            view = bytes_of(data)
            self._file.write(view)
            self._location.on_bytes(view.nbytes)
            return view.nbytes

    def read_into(self, memory: Any) -> int:
        """Fills memory from the file, as `Reader.read_into` says, and counts the bytes."""
        with self._location._named(self._name, "read"):
            view, got = bytes_of(memory), 0
            while got < view.nbytes:
                count = self._file.readinto(view[got:])
                if not count:
                    break
                got += count
                self._location.on_bytes(count)
            return got

    def close(self) -> None:
        """Makes what was written durable, then visible. Raises CheckpointError; then it is abandoned."""
        with self._location._named(self._name, "write"):
            self._file.close()

    def abandon(self) -> None:
        """Removes what was written. May be called at any time, again, and after `close`, which stands."""
        with self._location._named(self._name, "remove"):
            self._file.abandon()


class _Store(Protocol):
    """A kind of file system, implemented by `_Local` and `_Remote`. Its methods may raise any error."""

    def below(self, folder: str) -> _Store: ...

    def read(self, name: str) -> bytes: ...

    def read_range(self, name: str, offset: int, count: int) -> bytes: ...

    def open_read(self, name: str) -> Any: ...

    def open_write(self, name: str) -> Any: ...

    def list(self, folder: str) -> list[str]: ...

    def size(self, name: str) -> int: ...

    def exists(self, name: str) -> bool: ...

    def is_link(self, name: str) -> bool: ...

    def remove(self, name: str) -> None: ...


# this machine ------------------------------------------------------------------------------------------


class _Local:
    """A folder of this machine's file system, without fsspec: it does not sync."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def below(self, folder: str) -> _Local:
        return _Local(self.folder / folder)

    def read(self, name: str) -> bytes:
        return self._file(name).read_bytes()

    def _file(self, name: str) -> Path:
        """Returns the path of a file. Refuses what is none: a pipe, say, would be read for ever."""
        path = self.folder / name
        mode = os.stat(path).st_mode
        if not stat.S_ISREG(mode):
            raise OSError(
                *((errno.EISDIR, "a folder, not a file") if stat.S_ISDIR(mode) else (errno.ENXIO, "not a file"))
            )
        return path

    def is_link(self, name: str) -> bool:
        return (self.folder / name).is_symlink()

    def read_range(self, name: str, offset: int, count: int) -> bytes:
        with open(self._file(name), "rb", buffering=0) as file:
            file.seek(offset)
            found = bytearray()
            while len(found) < count and (piece := file.read(count - len(found))):
                found += piece
            return bytes(found)

    def open_read(self, name: str) -> Any:
        return open(self._file(name), "rb", buffering=0)

    def open_write(self, name: str) -> _LocalWriter:
        return _LocalWriter(self.folder / name)

    def list(self, folder: str) -> list[str]:
        try:
            return os.listdir(self.folder / folder)
        except FileNotFoundError:
            return []

    def size(self, name: str) -> int:
        return os.stat(self.folder / name).st_size

    def exists(self, name: str) -> bool:
        try:
            os.stat(self.folder / name)
        except FileNotFoundError:
            return False
        return True

    def remove(self, name: str) -> None:
        path = self.folder / name
        try:
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
        except (FileNotFoundError, NotADirectoryError):  # the latter: below a file
            return
        sync_folder(path.parent)


class _LocalWriter:
    """Writes beside the name, syncs, renames, and syncs the folder."""

    def __init__(self, path: Path) -> None:
        self._path = path
        _make_folder(path.parent)
        self._part = path.with_name(f".{path.name}.{secrets.token_hex(6)}")
        self._file = DirectFile(self._part)
        self._there = True

    def write(self, view: memoryview) -> None:
        self._file.write(view)

    def close(self) -> None:
        try:
            self._file.sync()
            self._file.close()
            os.replace(self._part, self._path)
            self._part = self._path  # what is not known to be durable does not stay
            sync_folder(self._path.parent)
            sync_folder(self._path.parent.parent)
        except BaseException:
            self.abandon()
            raise
        self._there = False

    def abandon(self) -> None:
        if self._there:
            self._there = False
            try:
                self._file.close()
            finally:
                self._part.unlink(missing_ok=True)


def _make_folder(path: Path) -> None:
    """Creates a folder and those above it, so that they survive the loss of power."""
    missing = []
    while not path.exists():
        missing.append(path)
        path = path.parent
    for folder in reversed(missing):
        folder.mkdir(exist_ok=True)
        sync_folder(folder.parent)


# elsewhere ---------------------------------------------------------------------------------------------


class _Remote:
    """A folder of a file system of fsspec."""

    def __init__(self, url: str) -> None:
        try:
            self._files, root = fsspec.core.url_to_fs(url, use_listings_cache=False)
        except ImportError as error:
            raise CheckpointError(f"{url}: {error}; install the package that it names") from error
        except ValueError as error:
            raise CheckpointError(f"{url}: {error}; name a folder, or a URL that fsspec knows") from error
        self._root = root.rstrip("/")
        if found := sorted(set(self._root) & set(PATTERNS)):
            raise CheckpointError(
                f"{url}: fsspec takes {' '.join(found)} for a pattern, and would remove what else it fits; name a place"
                f" without any of {' '.join(PATTERNS)}"
            )
        protocols = self._files.protocol
        names = {protocols} if isinstance(protocols, str) else set(protocols)
        self._whole = bool(names & OBJECT_STORES)

    def below(self, folder: str) -> _Remote:
        inner = object.__new__(_Remote)
        inner._files, inner._root, inner._whole = self._files, f"{self._root}/{folder}", self._whole
        return inner

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}" if name else self._root

    def read(self, name: str) -> bytes:
        return bytes(self._files.cat_file(self._path(name)))

    def read_range(self, name: str, offset: int, count: int) -> bytes:
        return bytes(self._files.cat_file(self._path(name), start=offset, end=offset + count)) if count else b""

    def open_read(self, name: str) -> Any:
        return self._files.open(self._path(name), "rb")

    def open_write(self, name: str) -> _RemoteWriter:
        return _RemoteWriter(self._files, self._path(name), self._whole)

    def list(self, folder: str) -> list[str]:
        path = self._path(folder)
        self._files.invalidate_cache(path)
        try:
            found = self._files.ls(path, detail=False)
        except FileNotFoundError:
            return []
        names = (str(name).rstrip("/").rpartition("/")[2] for name in found if str(name).strip("/") != path.strip("/"))
        return [name for name in names if name]

    def size(self, name: str) -> int:
        self._files.invalidate_cache(self._path(name))
        return int(self._files.info(self._path(name))["size"])

    def exists(self, name: str) -> bool:
        self._files.invalidate_cache(self._path(name))
        try:
            self._files.info(self._path(name))  # `exists` of fsspec takes any error for "it is not"
        except FileNotFoundError:
            return False
        return True

    def is_link(self, name: str) -> bool:
        return False

    def remove(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._files.rm(self._path(name), recursive=True)
        self._files.invalidate_cache(self._path(name))


class _RemoteWriter:
    """Writes an object; in stores where it could be seen while it grows, under another name."""

    def __init__(self, files: Any, path: str, whole: bool) -> None:
        self._files, self._path = files, path
        folder, _, name = path.rpartition("/")
        if not whole:
            files.makedirs(folder, exist_ok=True)
        self._part = path if whole else f"{folder}/.{name}.{secrets.token_hex(6)}"
        self._file = files.open(self._part, "wb")
        self._there = True

    def write(self, view: memoryview) -> None:
        self._file.write(view)

    def close(self) -> None:
        try:
            self._file.close()
            if self._part != self._path:
                self._files.mv(self._part, self._path)
        except BaseException:
            self.abandon()
            raise
        self._there = False

    def abandon(self) -> None:
        if not self._there:
            return
        self._there = False
        if self._part == self._path:  # an object that was not completed: nobody has ever seen it
            if not self._file.closed:
                self._file.discard()
                self._file.closed = True  # or its end, some time, would complete it
        else:
            self._file.close()
            with contextlib.suppress(FileNotFoundError):
                self._files.rm(self._part)
