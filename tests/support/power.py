"""A process that dies, or a machine without power, at any of the calls by which `storage` changes a local folder.

power = Power(folder, monkeypatch)
power.fail_at = 7
with pytest.raises(Crash): ...          # the 7th call does not happen, nor does any after it
power.after_power_loss(elsewhere)       # what was synced, and nothing else
"""

import os
import shutil
import stat
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from torch_ecrec.storage import location


class Crash(BaseException):
    """The process is gone: nothing is caught, and nothing is tidied."""


class Power:
    """Watches a folder.

    Args:
        folder: with what is in it, which is taken to be durable.
        patch: undoes all of this.

    Attributes:
        calls: that were made. `fail_at`: number of the call that does not happen; 0: none.
    """

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.folder, self.calls, self.fail_at = folder, 0, 0
        self._names: dict[int, dict[str, int]] = {}  # of a folder's inode: what its last sync has made durable
        self._bytes: dict[int, bytes] = {}
        # What is open is not freed: no later file gets the inode of one that was synced and then removed.
        self._held: dict[int, int] = {}
        weakref.finalize(self, _close, self._held)
        for path in [folder, *folder.rglob("*")]:
            self._keep(path)

        def fsync(descriptor: int) -> None:  # without waiting for the disk
            self._call()
            self._keep(Path(os.readlink(f"/proc/self/fd/{descriptor}")))

        patch.setattr(os, "fsync", fsync)
        for owner, name in (
            (os, "replace"),
            (shutil, "rmtree"),
            (Path, "mkdir"),
            (Path, "unlink"),
            (location._LocalWriter, "write"),
        ):
            patch.setattr(owner, name, self._counted(getattr(owner, name)))

    def _counted(self, function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            self._call()
            return function(*args, **kwargs)

        return call

    def _call(self) -> None:
        self.calls += 1
        if self.fail_at and self.calls >= self.fail_at:
            raise Crash

    def _keep(self, path: Path) -> None:
        info = path.stat()
        if info.st_ino not in self._held:
            self._held[info.st_ino] = os.open(path, os.O_PATH | os.O_CLOEXEC)
        if stat.S_ISDIR(info.st_mode):
            self._names[info.st_ino] = {entry.name: entry.inode() for entry in os.scandir(path)}
        else:
            self._bytes[info.st_ino] = path.read_bytes()

    def after_power_loss(self, into: Path) -> None:
        """Puts into a new folder what is durable: synced bytes, under synced names."""
        self._copy(self.folder.stat().st_ino, into)

    def _copy(self, inode: int, into: Path) -> None:
        into.mkdir()
        for name, inner in self._names.get(inode, {}).items():
            if inner in self._names or inner not in self._bytes:
                # A folder; or a file, or folder, of which nothing was ever synced.
                self._copy(inner, into / name)
            else:
                (into / name).write_bytes(self._bytes[inner])


def _close(held: Mapping[int, int]) -> None:
    for descriptor in held.values():
        os.close(descriptor)
