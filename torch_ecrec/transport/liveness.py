"""Whether a process lives, asked of its host's kernel: it listens for as long as it lives, and no longer.

    door = Door("10.0.0.7")         # in the process; door.address goes to whoever may ask
    await probe(door.address)       # ALIVE; GONE as soon as the process has ended, however it did

A process that hangs counts as alive here: its kernel answers for it. That takes a lease.

A child that is forked (a DataLoader's worker) would keep the sockets of its parent open, and with them the parent's
signs of life, for as long as it lives: `keep_from_children` closes them in it. Programs that are started get none.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
import threading
import time

Address = tuple[str, int]
GONE, UNREACHABLE, ALIVE = "gone", "unreachable", "alive"
PROBE_S = 1.0  # without an answer by then, the process cannot be reached
PAUSE_S = 0.2  # after a failed accept: no more descriptors, for instance
NO_WAY = {errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENETDOWN, errno.EHOSTDOWN, errno.ETIMEDOUT}

_kept: dict[int, socket.socket] = {}  # sockets that children must not hold, by id
_registered = threading.Event()


def keep_from_children(sock: socket.socket) -> None:
    """Closes this process's socket in children that are forked from now on, until `forget`."""
    if not _registered.is_set():
        _registered.set()
        os.register_at_fork(after_in_child=_close_all)
    _kept[id(sock)] = sock


def forget(sock: socket.socket) -> None:
    """The socket has been closed."""
    _kept.pop(id(sock), None)


def _close_all() -> None:
    for sock in list(_kept.values()):
        sock.close()
    _kept.clear()


async def probe(address: Address) -> str:
    """GONE: nobody listens there. UNREACHABLE: no answer within `PROBE_S`. ALIVE: somebody does, or nothing is known
    since this process itself cannot connect (no more descriptors): never a reason to take another for lost."""
    try:
        _, writer = await asyncio.wait_for(asyncio.open_connection(*address), PROBE_S)
    except TimeoutError:
        return UNREACHABLE
    except ConnectionError:
        return GONE
    except OSError as error:
        return UNREACHABLE if error.errno in NO_WAY else ALIVE
    writer.transport.abort()
    return ALIVE


class Door:
    """Listens at `address`, and closes what it accepts.

    Raises:
        OSError: nobody can listen at `host`.
    """

    def __init__(self, host: str) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family, backlog=64)
        self.address: Address = self._listener.getsockname()[:2]
        self._closed = False
        keep_from_children(self._listener)
        threading.Thread(target=self._serve, name="door", daemon=True).start()

    def _serve(self) -> None:
        while not self._closed:
            try:
                self._listener.accept()[0].close()
            except OSError:
                if not self._closed:
                    time.sleep(PAUSE_S)
        self._listener.close()

    def close(self) -> None:
        """Nobody listens there any more. May be called again."""
        self._closed = True
        forget(self._listener)
        with contextlib.suppress(OSError):  # closed already
            self._listener.shutdown(socket.SHUT_RDWR)
