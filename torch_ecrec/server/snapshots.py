"""The dense snapshots that a slot keeps: parts of the dense model after a step, one from each trainer.

r + 1 slots keep them (`ServerProcess.snapshot_slots`); the others' stores stay empty. A snapshot is *whole* when every
trainer's part is there. The new host of a slot copies them from another holder, one that is whole itself; so does a
holder that lacks a part of the snapshot that training starts again from.

Steps before the watermark are forgotten: nobody goes back further.

Of each part a sum of its bytes is kept, made when it came, and compared before anybody relies on it. A part that is
damaged is not kept any more: another holder's counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import xxhash
from torch import Tensor

from torch_ecrec.durability.context import Reply, SlotContext
from torch_ecrec.durability.scrubber import Scrubber
from torch_ecrec.protocol import wire
from torch_ecrec.protocol.pieces import Gathering, Key, Part, cut
from torch_ecrec.protocol.wire import Malformed, Refused
from torch_ecrec.server.process import ServerProcess
from torch_ecrec.transport.node import RETRY_S


class SnapshotStore:
    """Keeps one incarnation of a slot's copies of the dense model, in parts.

    Args:
        slot: whose it is. Where its records are sealed, sums of the parts are kept.
        host: reaches other slots.
        scrubber: is told of damage.
    """

    def __init__(self, slot: SlotContext, host: ServerProcess, scrubber: Scrubber) -> None:
        self.slot, self.host, self.scrubber = slot, host, scrubber
        self.index, self.incarnation = slot.life
        self.trainers = slot.held.job.trainers  # a whole snapshot has so many parts
        self.parts: dict[Key, Part] = {}
        self._summed = slot.held.sealed
        self._sums: dict[Key, int] = {}  # of some parts that are not kept any more, too
        self.lacks_all = False  # what other holders have is not here yet
        self.most: int | None = None  # the trainers start again after this step: later ones are not taken from others
        self._asking = False

    @property
    def bytes(self) -> int:
        return sum(payload.numel() for _, payload in self.parts.values())

    def found(self) -> dict[int, tuple[int, list[int]]]:
        """Returns, by step, the steps of training that are done then, and the trainers whose parts are here."""
        found: dict[int, tuple[int, list[int]]] = {}
        for (step, trainer), (header, _) in sorted(self.parts.items()):
            found.setdefault(step, (header[0], []))[1].append(trainer)
        return found

    def is_whole(self, step: int) -> bool:
        """Returns whether every trainer's part is here. Nobody needs any before training: that is the model as it was
        made."""
        before_training = self.host.load_end is None or step <= self.host.load_end
        return before_training or all((step, trainer) in self.parts for trainer in range(self.trainers))

    def forget(self, watermark: int) -> None:
        for key in [key for key in self.parts if key[0] < watermark]:
            del self.parts[key]
            self._sums.pop(key, None)

    def take_over(self, parts: Mapping[Key, Part], most: int | None) -> None:
        """Goes on as the store of the life before."""
        self.most = most
        for key, part in parts.items():
            self._put(key, part)

    def begin_anew(self) -> None:
        """Copies nothing more: the dense model is lost everywhere."""
        self.lacks_all = False

    def go_back(self, step: int) -> None:
        """Drops snapshots of steps after `step`, since training starts again there; gets what is missing of that
        step."""
        self.most = step if self.host.load_end is not None else 0  # all begin anew: none counts
        self.parts = {key: part for key, part in self.parts.items() if key[0] <= self.most}
        if not self.complete:
            self._copy()

    def check(self, steps: Iterable[int] | None = None) -> None:
        """Lets go of parts (of these steps, or of all) that are damaged."""
        wanted = None if steps is None else set(steps)
        for key, (_, payload) in list(self.parts.items()):
            known = self._sums.get(key)
            if known is not None and (wanted is None or key[0] in wanted) and _sum_of(payload) != known:
                del self.parts[key], self._sums[key]
                self.scrubber.on_snapshot(*key)

    def _put(self, key: Key, part: Part) -> None:
        self.parts[key] = part
        if self._summed:
            self._sums[key] = _sum_of(part[1])

    # requests -----------------------------------------------------------------------------------

    def on_snapshot(self, request: wire.Snapshot, reply: Reply[wire.Stored]) -> None:
        self.most = None
        self._put((request.step, request.trainer), (request.header, request.payload))
        reply(wire.Stored(request.step, self.slot.known_incarnations()))
        self.slot.on_snapshot_kept(request.step, request.header[0])

    def on_fetch(self, request: wire.FetchSnapshots, reply: Reply[wire.Snapshots]) -> None:
        if request.holder >= 0:
            # From now on this slot tells trainers that an earlier life of the holder counts for nothing.
            self.slot.meet(request.holder, request.holder_incarnation)
        self.check(None if request.of < 0 else [request.of])
        if not self.complete:
            self._copy()
        lacks_some = self.lacks_all if request.of < 0 else request.holder < 0 and not self.is_whole(request.of)
        if len(request.begin) not in (0, 3):
            reply(Malformed(f"`begin` must be 3 integers or none, got {request.begin}"))
            return
        if not self.slot.ready or lacks_some:
            reply(Refused(f"slot {self.index} has not got them all itself"))
            return
        reply(cut(self.parts, request.of, request.begin))

    # copies ---------------------------------------------------------------------------------------

    def copy_all(self) -> None:
        """Asks the other holders in turn for all they have, as the new host of a lost slot."""
        if self._is_holder and len(self.host.snapshot_slots) > 1:
            self.lacks_all = True
            self._copy()

    @property
    def complete(self) -> bool:
        """Whether nothing is missing that other holders may have."""
        return not self.lacks_all and (self.most is None or not self._is_holder or self.is_whole(self.most))

    @property
    def _is_holder(self) -> bool:
        return self.index in self.host.snapshot_slots

    def _copy(self) -> None:
        """Asks the other holders for what is missing. One of them has everything, as long as at most r are lost."""
        others = [h for h in self.host.snapshot_slots if h != self.index]
        if others and not self._asking:
            self._asking = True
            self._ask(others, 0, self._gathering())

    def _gathering(self) -> Gathering:
        return Gathering(-1 if self.lacks_all or self.most is None else self.most)

    def _ask(self, others: list[int], turn: int, got: Gathering) -> None:
        """Asks one of the others for its next answer.

        It meets this slot's incarnation before it gives the first one: what is stored there later, trainers bring here,
        too. So one holder's answers are enough together, also if some come much later.
        """
        holder = others[turn % len(others)]

        def make(incarnation: int) -> wire.FetchSnapshots:
            begin = got.begin(incarnation)
            return wire.FetchSnapshots(holder, incarnation, got.of, self.index, self.incarnation, begin)

        def done(answer: wire.Snapshots | None) -> None:
            if self.slot.dead:
                return
            if answer is not None:
                try:
                    all_here = got.take(answer)
                except ValueError:
                    pass  # as if it had not answered: another one is asked
                else:
                    if not all_here:
                        self._ask(others, turn, got)
                        return
                    self._keep(got)
            if self.complete:
                self._asking = False
                self.slot.on_snapshots_copied()
            else:
                again = self._gathering()
                self.host.later(RETRY_S, lambda: None if self.slot.dead else self._ask(others, turn + 1, again))

        self.host.ask_once(holder, make, done)

    def _keep(self, got: Gathering) -> None:
        for (step, trainer), part in got.parts.items():
            if self.most is None or step <= self.most:
                if (step, trainer) not in self.parts:
                    self._put((step, trainer), part)
        self.lacks_all &= got.of >= 0


def _sum_of(payload: Tensor) -> int:
    return xxhash.xxh3_64_intdigest(payload.contiguous().numpy().data)
