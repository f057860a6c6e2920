"""Finds out whether a process lives from its host's kernel: the process listens for as long as it lives.

    sign = SignOfLife("10.0.0.7")   # in the process; sign.address goes to whoever may ask
    await probe(sign.address)       # ALIVE; GONE as soon as the process has ended, however it did
    sign.turn(well=True)            # with each heartbeat
    await probe(sign.address)       # COMPUTES, if a call in C has held the interpreter's lock for a while, and computes

A process that hangs counts as alive here: its kernel answers for it. That takes a lease. What it says itself comes from
a thread that needs no lock (`runtime/unlocked.py`).

A child that is forked (a DataLoader's worker) lets go of it (`lifetime.py`): it would be its parent's sign of life.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import signal
import socket
import time

from torch_ecrec.runtime.addresses import family_of
from torch_ecrec.runtime.lifetime import COMPUTES as SAYS_COMPUTES
from torch_ecrec.runtime.lifetime import belongs_here
from torch_ecrec.runtime.threads import Worker, log_error

Address = tuple[str, int]
GONE, UNREACHABLE, ALIVE, COMPUTES = "gone", "unreachable", "alive", "computes"
PROBE_S = 1.0  # without an answer by then, the process cannot be reached
NO_WAY = {errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENETDOWN, errno.EHOSTDOWN, errno.ETIMEDOUT}


async def probe(address: Address) -> str:
    """Finds out whether the process at an address lives, within `PROBE_S`.

    Returns:
        GONE: nobody listens there. UNREACHABLE: no answer of its kernel. COMPUTES: its threads wait for the
        interpreter's lock, and it computes. ALIVE: somebody listens, or nothing is known since this process itself
        cannot connect (no more descriptors): never a reason to take another for lost.
    """
    until_s = time.monotonic() + PROBE_S
    try:
        reader, writer = await asyncio.wait_for(asyncio.open_connection(*address), PROBE_S)
    except TimeoutError:
        return UNREACHABLE
    except ConnectionError:
        return GONE
    except OSError as error:
        return UNREACHABLE if error.errno in NO_WAY else ALIVE
    try:
        said = await asyncio.wait_for(reader.read(1), max(until_s - time.monotonic(), 0.0))
    except (OSError, TimeoutError):  # it ends, or was stopped: the next probe tells
        said = b""
    writer.transport.abort()
    return COMPUTES if said == SAYS_COMPUTES else ALIVE


class SignOfLife:
    """Listens at `address` as long as this process lives; answers each connection with its state, and closes it.

    Raises:
        OSError: this process cannot listen at `host`.
    """

    def __init__(self, host: str) -> None:
        self._listener = socket.create_server((host, 0), family=family_of(host), backlog=64)
        self.address: Address = self._listener.getsockname()[:2]
        from torch_ecrec.runtime import unlocked  # compiled code, which who only asks does not load

        self._answers = unlocked.Answers()
        belongs_here(self)
        Worker(self._serve, "sign of life", log_error).start()

    def turn(self, well: bool) -> None:
        """Notes that the heartbeat thread runs. `well`: it sees nothing here that hangs."""
        self._answers.turn(well)

    def ends(self, limit_s: float, code: int) -> None:
        """Makes this process exit with `code` if it hangs for `limit_s` with the interpreter's lock held."""
        self._answers.ends(limit_s, code)

    def _serve(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # they are for threads that run Python
        self._answers.run(self._listener.fileno())
        self._listener.close()

    def on_forked(self) -> None:
        """Closes the listener in a forked child."""
        self._listener.close()

    def close(self) -> None:
        """Stops listening. May be called again."""
        self._answers.end()
        with contextlib.suppress(OSError):  # closed already
            self._listener.shutdown(socket.SHUT_RDWR)
