"""Who configures no checkpoints pays nothing for them: no memory, and nothing of a step is looked at."""

from types import SimpleNamespace
from typing import Any

import pytest

from torch_ecrec.protocol import messages
from torch_ecrec.server.checkpoints import SlotCheckpoints


class Untouchable:
    """Fails when anything of it is looked at."""

    def __getattribute__(self, name: str) -> Any:
        raise AssertionError(f"`{name}` was looked at")

    def __iter__(self) -> Any:
        raise AssertionError("it was gone through")

    def __len__(self) -> int:
        raise AssertionError("it was counted")


def made(checkpointing: messages.Checkpointing) -> SlotCheckpoints:
    nothing: Any = Untouchable()
    slot: Any = SimpleNamespace(held=nothing)
    return SlotCheckpoints(slot, SimpleNamespace(checkpointing=checkpointing), nothing, nothing, 1 << 30)  # type: ignore[arg-type]


def test_no_checkpoints_no_cost() -> None:
    checkpoints, nothing = made(messages.Checkpointing(0, False)), Untouchable()
    before = {**vars(checkpoints)}
    for step in range(1, 1000):
        checkpoints.on_applied(step, nothing, nothing, step)  # type: ignore[arg-type]
        assert checkpoints.keeps(step) == step, "the log forgets as it does otherwise"
    assert checkpoints.kept_bytes == 0 and checkpoints._marks is None
    assert all(value is before[name] or value == before[name] for name, value in vars(checkpoints).items())


def test_the_oracle_is_none_of_a_slot_that_has_marks() -> None:
    checkpoints: Any = made(messages.Checkpointing(0, True))
    checkpoints._marks = []
    with pytest.raises(AssertionError, match="gone through"):
        checkpoints.on_applied(1, Untouchable(), Untouchable(), 1)
