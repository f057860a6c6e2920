"""Pushes and loads that wait for their step: who has sent what of which step, and when a step has all it needs.

Pure bookkeeping: no clock, no I/O, and nobody looks into the tensors. Steps are applied in order, so only the one that
follows the last applied is ever asked for. Example: step 3 is applied; of two trainers, 0 has pushed steps 4 and 5, and
1 has pushed step 5. Step 4 is not due, so nothing is. Trainer 1 pushes step 4: both are due, one after the other.
"""

from __future__ import annotations

from torch_ecrec.protocol import wire


class Inbox:
    """What waits for its step at one slot.

    Args:
        trainers: how many push in a step of training. A step that loads initial values is one trainer's.
    """

    def __init__(self, trainers: int) -> None:
        self.trainers = trainers
        self.pushes: dict[int, dict[int, wire.Push]] = {}  # step -> trainer -> its push
        self.loads: dict[int, wire.Load] = {}  # by step

    def __len__(self) -> int:
        """For how many steps something waits."""
        return len(self.pushes) + len(self.loads)

    def put(self, request: wire.Push | wire.Load) -> None:
        """Keeps a push or a load; the same once more takes the place of the first."""
        if isinstance(request, wire.Load):
            self.loads[request.step] = request
        else:
            self.pushes.setdefault(request.step, {})[request.trainer] = request

    def due(self, step: int) -> wire.Load | dict[int, wire.Push] | None:
        """All that a step needs: a load, or the pushes of all trainers, by trainer; None while something is missing."""
        if step in self.loads:
            return self.loads[step]
        pushes = self.pushes.get(step, {})
        return pushes if len(pushes) == self.trainers else None

    def on_applied(self, step: int) -> None:
        """A step that was due has been applied: lets go of what it needed."""
        if step in self.loads:
            del self.loads[step]
        else:
            del self.pushes[step]

    def keep_after(self, step: int) -> None:
        """Lets go of all that was sent of steps up to `step`."""
        self.pushes = {at: pushes for at, pushes in self.pushes.items() if at > step}
        self.loads = {at: load for at, load in self.loads.items() if at > step}

    def clear(self) -> None:
        """Lets go of everything."""
        self.pushes, self.loads = {}, {}
