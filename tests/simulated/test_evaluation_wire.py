"""Evaluations whose rows travel quantised (`evaluation_wire="int8"`) over the simulated cluster; servers are lost."""

from __future__ import annotations

import dataclasses

import fbgemm_gpu  # noqa: F401  registers torch.ops.fbgemm
import pytest
import torch
from test_backend import JOB, TABLE_GROUPS, Real, all_records, batch, step, weights
from torch import Tensor

from torch_ecrec.protocol import wire

STEPS = 4


def by_fbgemm(values: Tensor) -> Tensor:
    packed = torch.ops.fbgemm.FloatToFused8BitRowwiseQuantized(values)
    found: Tensor = torch.ops.fbgemm.Fused8BitRowwiseQuantizedToFloat(packed)
    return found


def run(
    lost_slot: int | None, evaluates: bool = True, under_way: bool = False
) -> tuple[list[Tensor], list[list[Tensor]], list[torch.dtype]]:
    """Trains and evaluates; before the second evaluation the host of a slot dies.

    Args:
        under_way: in it, as soon as another slot has answered.

    Returns:
        Records at the end, what each evaluation got, and the dtypes of all rows that were sent.
    """
    real, dtypes = Real(), []
    session, client = real.session, real.session.client
    client.settings = dataclasses.replace(client.settings, evaluation_wire="int8")
    judged, dooms = client.fault_of_answer, []

    def kill() -> None:
        real.cluster.network.kill(real.cluster.slots_known[lost_slot].server)
        dooms.clear()

    def noted(request: wire.Request, answer: wire.Answer) -> str | None:
        if isinstance(answer, wire.Rows):
            dtypes.extend({weight_UD.dtype for weight_UD in answer.weights if len(weight_UD)})
            if dooms and request.int8 and request.slot != lost_slot:
                dooms[0]()
        return judged(request, answer)

    client.fault_of_answer = noted
    session.loaded()
    evaluations = []
    for number in range(1, STEPS + 1):
        step(session, number)
        rows = batch(session, 100 + number)
        if number == 2 and lost_slot is not None:
            dooms.append(kill)
            if not under_way:
                kill()
        if evaluates:
            evaluations.append([torch.cat(parts) for parts in session.lookup_parts(rows, evaluation=True)])
            exact = [by_fbgemm(values) for values in weights(session, rows)]
            assert all(map(torch.equal, evaluations[-1], exact)), f"after step {number}"
    nothing = [torch.empty(0, dtype=torch.int64) for _ in TABLE_GROUPS]
    empty = [torch.cat(parts).shape for parts in session.lookup_parts(nothing, evaluation=True)]
    assert empty == [(0, table_group.dim) for table_group in JOB.table_groups]
    session.flush()
    assert not dooms, "nobody was killed"
    if lost_slot is not None:
        assert max(place.incarnation for place in real.cluster.slots_known) > 0, "it was lost"
    return all_records(session), evaluations, dtypes


@pytest.mark.parametrize("under_way", [False, True])
@pytest.mark.parametrize("lost_slot", [0, 1, 2])
def test_a_server_lost_during_evaluation_changes_nothing(lost_slot: int, under_way: bool) -> None:
    undisturbed, disturbed = run(None), run(lost_slot, under_way=under_way)
    assert all(map(torch.equal, undisturbed[0], disturbed[0]))
    for one, other in zip(undisturbed[1], disturbed[1], strict=True):
        assert all(map(torch.equal, one, other))


def test_training_gets_exact_rows_and_is_the_same_without_evaluations() -> None:
    records, _, dtypes = run(None)
    plain, _, dtypes_of_plain = run(None, evaluates=False)
    assert all(map(torch.equal, records, plain))
    assert set(dtypes) == {torch.float32, torch.uint8} and set(dtypes_of_plain) == {torch.float32}
