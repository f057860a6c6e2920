"""Measures one push as a message: encoded, decoded, and sent through a socket; and what packing saves.

Every number is microseconds of one core. A push has, for each table group, positions of `ROWS` rows and their
gradients.

    write       `Vocabulary.encode`: the message without its tensors' values
    read        `Vocabulary.decode_request`: validated, every tensor in its place
    round       encoded, framed, sent through a Unix socket pair, read, decoded: values are copied twice by the kernel

Times are the thread's own, alternatives take turns: see `codec.py`. Packing, which is between hosts only, has a table
of its own (`packing.py`).
"""

from __future__ import annotations

import argparse
import socket
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from torch_ecrec.bench import packing, record
from torch_ecrec.bench.codec import interleaved
from torch_ecrec.observe.progress import counted
from torch_ecrec.protocol import wire
from torch_ecrec.protocol.encoding import WIRE
from torch_ecrec.runtime.checks import require_int
from torch_ecrec.transport.frames import Frame, FrameReader

TABLE_GROUPS = (1, 2, 8, 26)
DIM = 16
ROWS = 64
CALLS = 200  # timed as one, for the clock
COLUMNS = ("write", "read", "round")
NOTES = """us of a core for a push: {rows} rows of {dim} columns a table group; median of {repeats} blocks in turns."""


def _push(table_groups: int) -> wire.Push:
    positions = [torch.arange(ROWS) * 3 + table_group for table_group in range(table_groups)]
    gradients = [torch.randn(ROWS, DIM) for _ in range(table_groups)]
    return wire.Push(0, 1, 2, 0, positions, gradients, [0.01] * table_groups, 2, 0)


def _measure(table_groups: int, repeats: int) -> dict[str, Any]:
    push = _push(table_groups)
    here, there = socket.socketpair()
    reader = FrameReader(there)

    def encoded() -> Any:
        return WIRE.encode(push)[0]

    def through(_: Any) -> None:
        assert Frame(1, encoded()).send_to(here, None, False), "the message does not fit into the socket's buffer"
        frame = reader.read()
        assert frame is not None
        WIRE.decode_request(frame[1])

    nothing = lambda: None  # noqa: E731
    with here, there:
        for end in (here, there):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        alternatives: dict[str, tuple[Callable[[], Any], Callable[[Any], object]]] = {
            "write": (nothing, lambda _: encoded()),
            "read": (encoded, WIRE.decode_request),
            "round": (nothing, through),
        }
        times = interleaved(alternatives, repeats, CALLS)
    row: dict[str, Any] = {"table_groups": table_groups, "tensors": 2 * table_groups, "body_bytes": len(encoded()[0])}
    return row | {f"{name} us": round(1e6 * statistics.median(times[name]), 2) for name in COLUMNS}


def run(arguments: argparse.Namespace) -> int:
    """Measures, prints the tables; writes OUT/messages.json and .csv, the second table in the JSON only."""
    require_int("repeats", arguments.repeats, 1)
    for table_groups in arguments.table_groups:
        require_int("table_groups", table_groups, 1)
    packing.check(arguments)
    rows = [
        _measure(table_groups, arguments.repeats)
        for table_groups in counted("messages: pushes", arguments.table_groups)
    ]
    packed = packing.measure(arguments)
    notes = NOTES.format(rows=ROWS, dim=DIM, repeats=arguments.repeats).splitlines()
    shown = [record.table(rows), *notes, "", record.table(packed), packing.NOTES]
    content = {"header": record.header(), "repeats": arguments.repeats, "notes": notes, "packing": packed}
    return record.finish(arguments.out, "messages", content, rows, shown="\n".join(shown))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `torch-ecrec bench messages`."""
    table_groups: Sequence[int] = list(TABLE_GROUPS)
    parser.add_argument("--table-groups", nargs="+", type=int, default=table_groups, metavar="S", help="in a push")
    parser.add_argument("--repeats", type=int, default=15, metavar="N", help="interleaved blocks (default 15)")
    packing.add_arguments(parser)
    parser.add_argument("--out", type=Path, default=Path("build/messages"), metavar="DIR")
