"""Lets the members of a torch.distributed.rpc world meet, at a store that the first member has.

At a *place* each member says something of itself; the first member waits until all have, and decides; the others wait
for its word. So all of them were there, and agree about what follows. For `rpc.py` alone: connections of our own need
nobody's agreement.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Sequence
from datetime import timedelta

from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]

from torch_ecrec.runtime.addresses import family_of

POLL_LEAST_S, POLL_MOST_S = 0.002, 0.02
CONNECT_S = 5.0
GOES_ON = ""  # said at a place by who can go on; else why not


def own_store(host: str) -> tuple[TCPStore, int]:
    """Makes a store that listens at `host` only; returns it and its port. Torch's default listens everywhere."""
    listener = socket.create_server((host, 0), family=family_of(host), backlog=1024)
    port = int(listener.getsockname()[1])
    store = TCPStore(
        host,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=CONNECT_S),
        master_listen_fd=listener.detach(),  # the store's from now on
    )
    return store, port


def store_of(host: str, port: int) -> TCPStore:
    """Connects to another member's store. Raises RuntimeError if it cannot be reached."""
    return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=CONNECT_S))


def meet(
    shared: Store,
    place: str,
    name: str,
    members: Sequence[str],
    says: str,
    check: Callable[[], None],
    limit_s: float | None = None,
) -> str:
    """Says something at `place`, and waits until all members have, or one of them cannot go on.

    Polls, since torch's own waiting is neither quiet nor interruptible.

    Args:
        name: the member that says it.
        says: `GOES_ON`, or why it cannot.
        check: called again and again; raises to end the waiting.
        limit_s: how long the first member waits for the others; None: until `check` raises.

    Returns:
        `GOES_ON`, or why not, the same for everybody.
    """
    shared.set(f"{place}/{name}", f"says {says}")
    verdict = f"{place}:all"
    if name == members[0]:
        until_s = None if limit_s is None else time.monotonic() + limit_s
        shared.set(verdict, _decide(shared, place, members, check, until_s))
    else:
        _wait(lambda: bool(shared.check([verdict])), check, None)
    return str(shared.get(verdict).decode().removeprefix("says "))


def _decide(shared: Store, place: str, members: Sequence[str], check: Callable[[], None], until_s: float | None) -> str:
    for member in members:
        key = f"{place}/{member}"
        if not _wait(lambda key=key: bool(shared.check([key])), check, until_s):  # type: ignore[misc]
            return f"says {member} did not come in time"
        said = str(shared.get(key).decode())
        if said != f"says {GOES_ON}":
            return f"{said} ({member})"
    return f"says {GOES_ON}"


def _wait(is_so: Callable[[], bool], check: Callable[[], None], until_s: float | None) -> bool:
    """Waits for a condition; returns whether it came true in time."""
    pause_s = POLL_LEAST_S
    while not is_so():
        check()
        if until_s is not None and time.monotonic() > until_s:
            return False
        time.sleep(pause_s)
        pause_s = min(1.5 * pause_s, POLL_MOST_S)
    return True
