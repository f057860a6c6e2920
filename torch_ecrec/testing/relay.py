"""Carries packets between two interfaces, a while later and not all of them: what netem does where the kernel lacks it.

Standard library alone. Its argument is JSON: interfaces (two), delay_s, jitter_s, loss, seed. It says `ready`, to each
line how many packets it has lost or carried later, and ends when its standard input does. Packets go as they are, also
those of 64 KiB that TCP leaves to the interface to cut, with what the kernel notes of their checksums
(`PACKET_VNET_HDR`).
"""

import heapq
import itertools
import json
import random
import selectors
import socket
import sys
import time

SOL_PACKET, PACKET_VNET_HDR, PACKET_OUTGOING, ETH_P_ALL = 263, 15, 4, 3
PACKET_MOST = 1 << 17  # bytes
WAITING_MOST = 100_000  # packets; more are lost


def opened(interface: str) -> socket.socket:
    """Opens a raw socket for the packets that arrive at an interface or leave by it."""
    found = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ETH_P_ALL))
    found.setsockopt(SOL_PACKET, PACKET_VNET_HDR, 1)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 26)
    found.bind((interface, ETH_P_ALL))
    found.setblocking(False)
    return found


def main() -> None:
    """Runs the relay until its parent ends."""
    options = json.loads(sys.argv[1])
    one, other = (opened(interface) for interface in options["interfaces"])
    opposite = {one: other, other: one}
    chance, numbers = random.Random(options["seed"]), itertools.count()
    waiting: list[tuple[float, int, socket.socket, bytes]] = []
    late = options["delay_s"] > 0 or options["jitter_s"] > 0
    met = 0
    selector = selectors.DefaultSelector()
    selector.register(sys.stdin, selectors.EVENT_READ)  # whoever asks waits for the answer: one line at a time
    for end in (one, other):
        selector.register(end, selectors.EVENT_READ, end)
    print("ready", flush=True)
    while True:
        span_s = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        for key, _ in selector.select(span_s):
            if key.data is None:
                if not sys.stdin.readline():
                    return
                print(met, flush=True)
                continue
            source = key.data
            for packet in arrived(source):
                lost = chance.random() < options["loss"] or len(waiting) >= WAITING_MOST
                met += lost or late
                if not lost:
                    due_s = time.monotonic() + options["delay_s"] + chance.uniform(0.0, options["jitter_s"])
                    heapq.heappush(waiting, (due_s, next(numbers), opposite[source], packet))
        while waiting and waiting[0][0] <= time.monotonic():
            _, _, to, packet = heapq.heappop(waiting)
            try:
                to.send(packet)
            except OSError:  # the interface is down, or its queue is full: a packet is lost
                continue


def arrived(source: socket.socket) -> list[bytes]:
    """Returns packets that have arrived, without those that this machine itself has sent by the interface."""
    found = []
    for _ in range(64):
        try:
            packet, (_, _, kind, _, _) = source.recvfrom(PACKET_MOST)
        except OSError:  # no more; or the interface is down
            break
        if kind != PACKET_OUTGOING:
            found.append(packet)
    return found


if __name__ == "__main__":
    main()
