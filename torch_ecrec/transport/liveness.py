"""Whether a process lives, asked of its host's kernel: it listens for as long as it lives, and no longer.

    sign = SignOfLife("10.0.0.7")   # in the process; sign.address goes to whoever may ask
    await probe(sign.address)       # ALIVE; GONE as soon as the process has ended, however it did

A process that hangs counts as alive here: its kernel answers for it. That takes a lease.

A child that is forked (a DataLoader's worker) lets go of it (`lifetime.py`): it would be its parent's sign of life.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
import threading
import time

from torch_ecrec.runtime.addresses import family_of
from torch_ecrec.runtime.lifetime import belongs_here

Address = tuple[str, int]
GONE, UNREACHABLE, ALIVE = "gone", "unreachable", "alive"
PROBE_S = 1.0  # without an answer by then, the process cannot be reached
PAUSE_S = 0.2  # after a failed accept: no more descriptors, for instance
NO_WAY = {errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENETDOWN, errno.EHOSTDOWN, errno.ETIMEDOUT}


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


class SignOfLife:
    """Listens at `address`, and closes what it accepts.

    Raises:
        OSError: nobody can listen at `host`.
    """

    def __init__(self, host: str) -> None:
        self._listener = socket.create_server((host, 0), family=family_of(host), backlog=64)
        self.address: Address = self._listener.getsockname()[:2]
        self._closed = False
        belongs_here(self)
        threading.Thread(target=self._serve, name="sign of life", daemon=True).start()

    def _serve(self) -> None:
        while not self._closed:
            try:
                self._listener.accept()[0].close()
            except OSError:
                if not self._closed:
                    time.sleep(PAUSE_S)
        self._listener.close()

    def on_forked(self) -> None:
        """In a forked child."""
        self._closed = True
        self._listener.close()

    def close(self) -> None:
        """Nobody listens there any more. May be called again."""
        self._closed = True
        with contextlib.suppress(OSError):  # closed already
            self._listener.shutdown(socket.SHUT_RDWR)
