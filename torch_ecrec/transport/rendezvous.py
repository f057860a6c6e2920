"""Lets the members of a torch.distributed.rpc world meet, at a store that one of them has.

Every member has a store. Which one they meet at is found by `gather`: one that all can reach. Two members that cannot
reach each other are no reason to have no world, as long as each reaches a third (a spare server needs no other spare).

At a *place* in that store each member says something of itself; the first member waits until all have, and decides;
the others wait for its word. So all of them were there, and agree about what follows. For `rpc.py` alone: connections
of our own need nobody's agreement.
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
WIDEN_S = 3.0  # a member that waits so long for the others looks for them at one more store
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


def gather(
    name: str,
    members: Sequence[str],
    first: str,
    store_at: Callable[[str], Store],
    lost: Callable[[str, Exception], None],
    check: Callable[[], None],
) -> tuple[str, Store]:
    """Waits until all members are at one store, and returns whose it is, and the store.

    A member goes to one store after the other until it is called. The first of `members` calls all to the first store
    at which it sees everybody; nobody else calls, so all meet at the same. A store is entered for good: who comes late
    finds there who has gone on looking.

    Args:
        name: the member that waits.
        first: whose store it looks at first. Where all say the same, they need only that one.
        store_at: returns a member's store. Raises RuntimeError or OSError if it cannot be reached.
        lost: called with whose store cannot be reached, and why. It is tried again later.
        check: called again and again; raises to end the waiting.
    """
    waiting = [first, *(member for member in members if member != first)]
    entered: dict[str, Store] = {}
    widen_s, pause_s = time.monotonic(), POLL_LEAST_S
    while True:
        if waiting and time.monotonic() >= widen_s:
            other = waiting.pop(0)
            try:
                store = store_at(other)
                store.set(f"here/{name}", "1")
                entered[other] = store
            except (RuntimeError, OSError) as error:
                lost(other, error)
                waiting.append(other)
            widen_s = time.monotonic() + (WIDEN_S if entered else 0.0)
        for other, store in list(entered.items()):
            check()
            try:
                if name == members[0] and store.check([f"here/{member}" for member in members]):
                    store.set("called", "1")
                if store.check(["called"]):
                    return other, store
            except (RuntimeError, OSError) as error:
                lost(other, error)
                del entered[other]
                waiting.append(other)
        check()
        time.sleep(pause_s)
        pause_s = min(1.5 * pause_s, POLL_MOST_S)


def meet(
    shared: Store,
    place: str,
    name: str,
    members: Sequence[str],
    says: str,
    check: Callable[[], None],
    limit_s: float,
) -> str:
    """Says something at `place`, and waits until all members have, or one of them cannot go on.

    Polls, since torch's own waiting is neither quiet nor interruptible.

    Args:
        name: the member that says it.
        says: `GOES_ON`, or why it cannot.
        check: called again and again; raises to end the waiting.
        limit_s: how long the first member waits for the others.

    Returns:
        `GOES_ON`, or why not, the same for everybody.
    """
    shared.set(f"{place}/{name}", f"says {says}")
    verdict = f"{place}:all"
    if name == members[0]:
        shared.set(verdict, _decide(shared, place, members, check, time.monotonic() + limit_s))
    else:
        _wait(lambda: bool(shared.check([verdict])), check, None)
    return str(shared.get(verdict).decode().removeprefix("says "))


def _decide(shared: Store, place: str, members: Sequence[str], check: Callable[[], None], until_s: float) -> str:
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
