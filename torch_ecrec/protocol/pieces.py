"""Dense snapshots in pieces: answers of a bounded size, whatever the model, the number of trainers and of steps.

A slot keeps parts of snapshots by (step, trainer), each with a header of a few integers and a payload of any size. Who
wants them asks again and again; every answer goes on where the one before has ended, in the order of the keys, and
brings at most `PIECE_BYTES`. With pieces of 100 bytes and parts of 60, 250 and 10 bytes, the answers bring

    60, then 40 of 250    more: [step, trainer, 40]
    100 of 250            more: [step, trainer, 140]
    100 of 250            more: [step, trainer, 240]
    10 of 250, then 10    more: []

A part that its keeper forgets in between is left out. If another one has taken its place in between (headers tell), all
is asked for again. Pure: does not know who asks whom, nor why.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from torch_ecrec.protocol.wire import Snapshots

PIECE_BYTES = 32 << 20  # of payloads, in one answer
PARTS_MOST = 4096  # in one answer, however small

Key = tuple[int, int]  # step, trainer
Part = tuple[list[int], Tensor]  # header, payload (bytes,) uint8


def cut(parts: Mapping[Key, Part], of: int, begin: list[int]) -> Snapshots:
    """Returns the next answer of a keeper. Payloads are views of those in `parts`.

    Args:
        parts: all that is kept.
        of: the step that is asked for; -1: all.
        begin: `more` of the answer before; [] at first.
    """
    answer, room = Snapshots(), PIECE_BYTES
    first, offset = ((begin[0], begin[1]), begin[2]) if begin else ((-1, -1), 0)
    for key in sorted(key for key in parts if of in (-1, key[0]) and key >= first):
        header, payload = parts[key]
        start = offset if key == first else 0
        if room <= 0 or len(answer.steps) == PARTS_MOST:
            answer.more = [*key, start]
            break
        piece = payload[start : start + room]
        answer.steps.append(key[0])
        answer.trainers.append(key[1])
        answer.headers.append(header)
        answer.payloads.append(piece)
        room -= len(piece)
        if start + len(piece) < len(payload):
            answer.more = [*key, start + len(piece)]
            break
    return answer


@dataclass
class Gathering:
    """Collects the parts that one keeper sends, over as many answers as it takes."""

    of: int  # see `cut`
    parts: dict[Key, Part] = field(default_factory=dict)  # whole ones
    more: list[int] = field(default_factory=list)  # where the next answer begins
    _life: int | None = None  # of the keeper
    _pieces: list[Tensor] = field(default_factory=list)  # of the part that is cut
    _header: list[int] = field(default_factory=list)  # its header

    def begin(self, life: int) -> list[int]:
        """Returns where the next answer is to begin. A keeper of another incarnation is asked from the beginning."""
        if self._life not in (None, life):
            self.parts, self.more, self._pieces = {}, [], []
        self._life = life
        return list(self.more)

    def take(self, answer: Snapshots) -> bool:
        """Takes an answer to what was asked for last. True: it was the last one.

        Raises:
            ValueError: it does not say of every part what it is, or does not go on.
        """
        if not len(answer.steps) == len(answer.trainers) == len(answer.headers) == len(answer.payloads):
            raise ValueError(f"snapshots of {len(answer.steps)} steps with {len(answer.payloads)} payloads")
        if answer.more and (len(answer.more) != 3 or answer.more <= self.more):
            raise ValueError(f"an answer to what begins at {self.more} goes on at {answer.more}")
        rows = zip(answer.steps, answer.trainers, answer.headers, answer.payloads, strict=True)
        for step, trainer, header, payload in rows:
            continues = self.more[:2] == [step, trainer] and self.more[2] > 0
            if continues and header != self._header:
                self.parts, self.more, self._pieces = {}, [], []
                return False
            pieces = [*self._pieces, payload] if continues else [payload]
            self._pieces = []
            if answer.more[:2] == [step, trainer] and answer.more[2] > 0:
                self._pieces, self._header = pieces, header
            else:
                self.parts[step, trainer] = header, pieces[0] if len(pieces) == 1 else torch.cat(pieces)
        self.more = answer.more
        return not answer.more

    def all(self) -> Snapshots:
        """Returns all pieces together, as one answer."""
        keys = sorted(self.parts)
        headers, payloads = [self.parts[key][0] for key in keys], [self.parts[key][1] for key in keys]
        return Snapshots([step for step, _ in keys], [trainer for _, trainer in keys], headers, payloads)
