"""A server process, as the slots that it hosts know it: what the coordinator has said, and who reads and writes
checkpoints. `service.py:Host` is one, with its slots.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from torch_ecrec.codec.linear import LinearCode
from torch_ecrec.durability.context import HostContext, Pending
from torch_ecrec.protocol import messages
from torch_ecrec.protocol.pieces import Key, Part
from torch_ecrec.protocol.waits import SlotWaits
from torch_ecrec.records.positions import Bytes, Positions
from torch_ecrec.records.tiers.budget import Tier
from torch_ecrec.records.tiers.trouble import Trouble
from torch_ecrec.server.capture import NextPortion
from torch_ecrec.spec.job import JobSpec, TableGroup
from torch_ecrec.spec.settings import Settings, require_tier
from torch_ecrec.transport.node import Node, Port


class CheckpointWriter(Protocol):
    """Writes parts of checkpoints, beside the protocol: what it is given to call, it calls inside `Node.run`.

    `processes/checkpoint_files.py:FileCheckpointWriter` writes them to a store, that of
    `tests/harness/checkpoints.py` on virtual time.
    """

    def write(
        self,
        order: messages.Capture,
        slot: int,
        table_groups: Sequence[TableGroup],
        next_portion: NextPortion,
        dense: Sequence[tuple[Key, Part]],
        done: Callable[[dict[str, Any]], None],
        failed: Callable[[str], None],
    ) -> Pending:
        """Begins to write one slot's part.

        Args:
            order: where, how fast, and in which form.
            slot: whose.
            table_groups: of the job: what records look like, whose they are.
            next_portion: gives the next records, of at most so many bytes; or what is to be run outside before it is
                called again; None at their end.
            dense: parts of the dense model that go with it.
            done: gets what the manifest has to say of the part, once it is durable.
            failed: gets the reason, for people.
        """


class CheckpointReader(Protocol):
    """Reads checkpoints, beside the protocol: what it is given to call, it calls inside `Node.run`.

    `processes/part_reader.py:FileReader` reads them from a store, that of
    `tests/harness/checkpoints.py` on virtual time.
    """

    def read(
        self,
        partial_restore: messages.PartialRestore,
        job: JobSpec,
        slot: int,
        take: Callable[[int, Positions, Bytes], None],
        done: Callable[[], None],
        failed: Callable[[str, bool], None],
    ) -> Pending:
        """Begins to read one slot's records.

        Args:
            partial_restore: of which checkpoint.
            job: whose layout says which records are the slot's.
            slot: whose.
            take: gets table group, positions (N,) int64, records (N, B) uint8; each record once.
            done: called once all were given.
            failed: gets the reason, for people, in place of `done`, and whether it may pass (`StoreUnavailable`).
        """


def tier_of(settings: Settings) -> Tier | None:
    """Returns the tier that a server's settings ask for; None: none. Raises TierFailed for a folder that is none."""
    if not settings.tier:
        return None
    require_tier(settings)
    trouble = Trouble() if settings.flip_on_signal else None
    return Tier(Path(settings.tier), settings.tier_memory_bytes, settings.tier_for == "parities", trouble)


class ServerProcess(Node, HostContext):
    """A node with what its slots share.

    Args:
        name, port: see `Node`.
        settings: of the process.
        writer: writes checkpoints; None: this process writes none.
        reader: reads them, for slots that begin with their records of one; None: this process reads none.

    Attributes:
        tier: where records are that do not fit in memory; None: all are in memory.
    """

    def __init__(
        self,
        name: str,
        port: Port,
        settings: Settings,
        writer: CheckpointWriter | None = None,
        reader: CheckpointReader | None = None,
    ) -> None:
        super().__init__(name, port, settings.call_timeout_s)
        self.settings, self.writer, self.reader = settings, writer, reader
        self.checkpointing = messages.Checkpointing()
        self.saves = messages.Saves()  # prioritised ones that count
        self.waits = SlotWaits(port.now_s, self.host_of)
        self.tier = tier_of(settings)
        self.frozen = False
        self.resume_step = 0  # where the era began: a step of the protocol
        self.done = 0  # steps of training until then
        self.floor = 0  # a slot that begins anew there is the same from here on: a step of the protocol
        self.partial_restores: list[messages.PartialRestore] = []  # of this run
        self.load_end = None
        self.code = LinearCode(1, 0)

    @abstractmethod
    def read_tier(self, read: Callable[[], None], done: Callable[[], None], awaited: bool) -> None:
        """Runs `read`, which waits for a disk, beside the node; then `done` inside of it: `SlotContext.read_tier`."""

    @property
    def snapshot_slots(self) -> tuple[int, ...]:
        """The r + 1 slots whose hosts keep the dense snapshots."""
        return tuple(range(min(self.code.n - self.code.k + 1, len(self.placement.slots)))) if self.placement else ()

    def unhealthy_slots(self) -> list[int]:
        return [i for i, place in enumerate(self.placement.slots) if not place.healthy] if self.placement else []
