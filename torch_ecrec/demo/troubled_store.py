"""A folder for checkpoints that can be made full, slow or failing while others write there, by the kernel's own errors.

    store = TroubledStore(Path("chaos/disk"))
    store.left_out                          # {} or {"full-disk": "a tmpfs cannot be mounted here: ..."}
    store.begin("full-disk"); ...; store.end()

full-disk        the folder is a file system of its own (tmpfs), and is made as large as what is in it: whoever writes
                 gets ENOSPC, root too
slow-store       whoever opens a file there waits `DELAY_S` for it: the kernel asks this process for leave (fanotify)
failing-store    a file stands where the folder was: whoever writes, reads or lists gets ENOTDIR

The file system is mounted in a mount namespace of this process and those that it starts later: nothing is left of it
when they are gone, however they end. Mounting and fanotify want Linux and its rights (CAP_SYS_ADMIN); where they are
missing, the first two are left out, by name.
"""

from __future__ import annotations

import ctypes
import os
import select
import struct
import threading
import time
from pathlib import Path

from torch_ecrec.runtime.threads import Worker, log_error

SIZE_BYTES = 4 << 30  # of the file system; what is not used takes no memory
DELAY_S = 0.4
POLL_S = 0.1
TRIES = 100  # to make the file system as large as what is in it, while others write

_CLONE_NEWNS, _MS_REMOUNT, _MS_REC, _MS_PRIVATE = 0x20000, 0x20, 0x4000, 1 << 18
_FAN_CLASS_CONTENT, _FAN_CLOEXEC, _FAN_MARK_ADD, _FAN_MARK_MOUNT = 4, 1, 1, 0x10
_FAN_OPEN_PERM, _FAN_ALLOW, _AT_FDCWD = 0x10000, 1, -100
_EVENT = struct.Struct("=IBBHQii")  # fanotify_event_metadata
_LEAVE = struct.Struct("=iI")  # fanotify_response


class TroubledStore:
    """A store with one trouble at a time, see the module.

    Args:
        folder: to be made; what was there is hidden while this process lives.

    Attributes:
        url: where checkpoints are kept.
        left_out: kinds of trouble that cannot be made here, each with the reason.
        delayed: how many opens had to wait.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder.resolve()
        self.left_out: dict[str, str] = {}
        self.delayed = 0
        self._kind = ""
        self._over = threading.Event()
        self._watch = -1
        self._watcher: threading.Thread | None = None
        error = _mount(self._folder)
        if error:
            reason = f"a tmpfs cannot be mounted here: {error}"
            self.left_out = {"full-disk": reason, "slow-store": reason}
        else:
            self._open_watch()
        self._store = self._folder / "store"
        self._store.mkdir(exist_ok=True)
        self.url = str(self._store)

    def begin(self, kind: str) -> None:
        """Begins a trouble.

        Raises:
            OSError: it cannot be made after all.
        """
        assert not self._kind and kind not in self.left_out
        if kind == "full-disk":
            self._fill()
        elif kind == "slow-store":
            self._mark(_FAN_MARK_ADD)
            self._over.clear()
            self._watcher = Worker(self._give_leave, "slow store", log_error)
            self._watcher.start()
        else:
            self._store.rename(self._away)
            self._store.touch()
        self._kind = kind

    def end(self) -> None:
        """Ends the trouble; does nothing if there is none."""
        kind, self._kind = self._kind, ""
        if kind == "full-disk":
            _call("mount", None, _text(self._folder), None, _MS_REMOUNT, b"size=%d" % SIZE_BYTES)
        elif kind == "slow-store":
            assert self._watcher is not None
            self._mark(2)  # FAN_MARK_REMOVE
            self._over.set()
            self._watcher.join()
        elif kind:
            self._store.unlink()
            self._away.rename(self._store)

    @property
    def _away(self) -> Path:
        return self._folder / "away"

    def _fill(self) -> None:
        for _ in range(TRIES):
            info = os.statvfs(self._folder)
            used = (info.f_blocks - info.f_bfree) * info.f_frsize
            try:
                _call("mount", None, _text(self._folder), None, _MS_REMOUNT, b"size=%d" % max(used, info.f_frsize))
            except OSError:  # more was written meanwhile
                continue
            return
        raise OSError(f"{self._folder} cannot be made as large as what is in it")

    # slow -----------------------------------------------------------------------------------------

    def _open_watch(self) -> None:
        try:
            self._watch = _call("fanotify_init", _FAN_CLASS_CONTENT | _FAN_CLOEXEC, os.O_RDONLY)
            self._mark(_FAN_MARK_ADD)
            self._mark(2)
        except (OSError, AttributeError) as error:
            self.left_out["slow-store"] = f"fanotify is not to be had here: {error}"

    def _mark(self, what: int) -> None:
        flags = ctypes.c_uint(what | _FAN_MARK_MOUNT)
        mask = ctypes.c_uint64(_FAN_OPEN_PERM)
        _call("fanotify_mark", self._watch, flags, mask, ctypes.c_int(_AT_FDCWD), _text(self._folder))

    def _give_leave(self) -> None:
        """Lets processes open files one by one, each after a while, until the trouble is over and none waits."""
        while True:
            ready, _, _ = select.select([self._watch], [], [], POLL_S)
            if not ready and self._over.is_set():
                return
            data, at = os.read(self._watch, 4096) if ready else b"", 0
            while at < len(data):
                size, _, _, _, _, file, pid = _EVENT.unpack_from(data, at)
                at += size
                if pid != os.getpid() and not self._over.is_set():
                    time.sleep(DELAY_S)
                    self.delayed += 1
                os.write(self._watch, _LEAVE.pack(file, _FAN_ALLOW))
                os.close(file)


def _mount(folder: Path) -> str:
    """Mounts a file system for this process and its future children; returns why it cannot, or ""."""
    try:
        _call("unshare", _CLONE_NEWNS)
        _call("mount", b"none", b"/", None, _MS_REC | _MS_PRIVATE, None)  # nobody outside sees what follows
        _call("mount", b"tmpfs", _text(folder), b"tmpfs", 0, b"size=%d" % SIZE_BYTES)
    except (OSError, AttributeError) as error:  # no rights; no Linux
        return str(error)
    return ""


def _text(path: Path) -> bytes:
    return os.fsencode(path)


def _call(name: str, *arguments: object) -> int:
    """Calls a function of the C library. Raises OSError if it fails, AttributeError if there is none."""
    function = getattr(ctypes.CDLL(None, use_errno=True), name)
    result: int = function(*arguments)
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result
