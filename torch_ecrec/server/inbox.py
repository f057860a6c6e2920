"""What trainers have sent of steps that wait: who has sent what of which step, and when a step has all it needs.

Pure bookkeeping: no clock, no I/O, and nobody looks into the tensors. Steps are applied in order, so only the one that
follows the last applied is ever asked for. Example: step 3 is applied; of two trainers, 0 has pushed steps 4 and 5, and
1 has pushed step 5. Step 4 is not due, so nothing is. Trainer 1 pushes step 4: both are due, one after the other.

In a step every trainer pushes; or every trainer loads or passes; or trainer 0 loads alone.
"""

from __future__ import annotations

from torch_ecrec.protocol import wire


class Inbox:
    """Keeps the parts of steps that have arrived at a slot and wait to be applied.

    Args:
        trainers: how many there are.
    """

    def __init__(self, trainers: int) -> None:
        self.trainers = trainers
        self.pushes: dict[int, dict[int, wire.Push]] = {}  # step -> trainer -> its push
        self.loads: dict[int, dict[int, wire.Load]] = {}  # step -> trainer -> its load
        self.passes: dict[int, set[int]] = {}  # step -> the trainers that pass

    def __len__(self) -> int:
        """Returns for how many steps something waits."""
        return len(self.pushes.keys() | self.loads.keys() | self.passes.keys())

    def put(self, request: wire.Part) -> None:
        """Keeps a trainer's part of a step; the same once more takes the place of the first."""
        match request:
            case wire.Load():
                self.loads.setdefault(request.step, {})[request.trainer] = request
            case wire.NoUpdate():
                self.passes.setdefault(request.step, set()).add(request.trainer)
            case wire.Push():
                self.pushes.setdefault(request.step, {})[request.trainer] = request

    def due(self, step: int) -> list[wire.Load] | dict[int, wire.Push] | None:
        """Returns all that a step needs; None while something is missing.

        Returns:
            The loads of those who load, in trainer order; or the pushes of all trainers, by trainer.
        """
        loads, pushes = self.loads.get(step, {}), self.pushes.get(step, {})
        alone = any(load.alone for load in loads.values())
        if alone or len(loads.keys() | self.passes.get(step, set())) == self.trainers:
            return [loads[trainer] for trainer in sorted(loads)]
        return pushes if len(pushes) == self.trainers else None

    def lacking(self, step: int) -> list[int]:
        """Returns the trainers whose part of a step is not here."""
        here = self.pushes.get(step, {}).keys() | self.loads.get(step, {}).keys() | self.passes.get(step, set())
        return [trainer for trainer in range(self.trainers) if trainer not in here]

    def on_applied(self, step: int) -> None:
        """Lets go of what an applied step needed."""
        for sent in (self.pushes, self.loads, self.passes):
            sent.pop(step, None)

    def keep_after(self, step: int) -> None:
        """Lets go of all that was sent of steps up to `step`."""
        self.pushes = {at: pushes for at, pushes in self.pushes.items() if at > step}
        self.loads = {at: loads for at, loads in self.loads.items() if at > step}
        self.passes = {at: trainers for at, trainers in self.passes.items() if at > step}

    def clear(self) -> None:
        """Lets go of all parts of steps that came and are not applied."""
        self.pushes, self.loads, self.passes = {}, {}, {}
