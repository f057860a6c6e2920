"""What TensorBoard is given of a status, and what is refused."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from watched import rebuilding, reports, whole

from torch_ecrec.nn.tensorboard import Scalars, TensorBoard
from torch_ecrec.protocol.status import Rate


def test_scalars_of_a_cluster_that_trains() -> None:
    status = whole(rate=Rate(10.0, 12.5, 3200.0), still_s=0.1)
    found = Scalars().of(status)
    assert found["steps_per_s"] == 12.5 and found["samples_per_s"] == 3200.0 and found["losses_tolerated"] == 1
    assert (found["members/servers"], found["members/spares"], found["members/trainers"]) == (3, 1, 2)
    assert found["slots/healthy"] == found["slots/rebuilt_least"] == 1.0 and found["verdict"] == 0
    assert found["memory_bytes/record"] == 120_000_000 and found["checkpoint/age_s"] == 42.0
    assert not any(name.startswith("sent_bytes") for name in found), "no rate of one look"
    assert all(isinstance(value, float) for value in found.values())


def test_scalars_of_a_rebuild_and_of_nothing() -> None:
    found = Scalars().of(rebuilding(whole(), 0.43))
    assert found["slots/healthy"] == pytest.approx(2 / 3) and found["slots/rebuilt_least"] == 0.43
    assert found["verdict"] == 1
    empty = Scalars().of(replace(whole(), slots=[], members=[], checkpoints=None, redundancy=None))
    assert "slots/healthy" not in empty and "silent_s" not in empty and "checkpoint/age_s" not in empty


def test_bytes_are_told_as_rates_and_who_is_new_does_not_jump() -> None:
    scalars, before = Scalars(), whole()
    scalars.of(before)
    sent = replace(reports(0), bytes_sent={"lookup": 50_000_600, "fold": 20_000_000})
    members = [replace(before.members[0], report=sent), *before.members[1:]]
    new = replace(before.members[1], name="server-9", pid=99)
    found = scalars.of(replace(before, time_s=before.time_s + 2.0, members=[*members, new]))
    assert found["sent_bytes_per_s/lookup"] == 300.0 and found["sent_bytes_per_s/fold"] == 0.0


def on_servers(trainer: int = 0) -> Any:
    """A model whose coordinator is nowhere."""
    return SimpleNamespace(session=SimpleNamespace(join="127.0.0.1:1", trainer=trainer, step=1))


def test_a_package_that_is_lacking_is_named_with_the_line_that_brings_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ImportError, match=r"pip install 'torch-ecrec\[tensorboard\]'"):
        TensorBoard(on_servers(), tmp_path)
    TensorBoard(on_servers(1), tmp_path).close()  # another trainer writes nothing, and needs none


def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no tables on servers"):
        TensorBoard(SimpleNamespace(session=SimpleNamespace(trainer=0)), tmp_path)  # type: ignore[arg-type]
    for every_s in (0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(ValueError, match="`every_s` must be"):
            TensorBoard(on_servers(), tmp_path, every_s)
    for given in (np.float32(2.5), torch.tensor(2.5), 2.5):
        assert TensorBoard(on_servers(1), tmp_path, given)._every_s == 2.5  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="every_s"):
        TensorBoard(on_servers(), tmp_path, "10")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="`to` must be a folder, or a SummaryWriter, got int"):
        TensorBoard(on_servers(), 5)  # type: ignore[arg-type]
