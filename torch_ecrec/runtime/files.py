"""Files that appear whole or not at all, so that an interrupted process, or a full disk, leaves no half of one."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def written_whole(path: Path, *, durable: bool = False) -> Iterator[Path]:
    """Yields the path of a file beside `path`, to be written. It takes that one's place unless the block raises.

    Args:
        durable: it is to be there after a loss of power, too: it has been costly, or something is removed for it.

    Raises:
        OSError: it cannot be written; the message names `path`, which that of a full disk does not.
    """
    part = path.with_name(f".{path.name}.{secrets.token_hex(6)}")
    try:
        yield part
        if durable:
            with part.open("rb") as file:
                os.fsync(file.fileno())
        os.replace(part, path)
        if durable:
            sync_folder(path.absolute().parent)
    except OSError as error:
        if error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        with contextlib.suppress(OSError):
            part.unlink()


def write_whole(path: Path, content: bytes, *, durable: bool = False) -> None:
    """Writes a file as `written_whole` does."""
    with written_whole(path, durable=durable) as part:
        part.write_bytes(content)


def sync_folder(path: Path) -> None:
    """Makes the names in a folder durable."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
