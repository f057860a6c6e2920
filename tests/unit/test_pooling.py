"""The pooling kernels against torch's autograd."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torch_ecrec.client import pooling


def plain(weights_UD, inverse_N, lengths_FB, per_id_N, mean_F):
    """(B, F, D) by loops over bags, with autograd."""
    features, batch = lengths_FB.shape
    out, n = [], 0
    for f in range(features):
        row = []
        for b in range(batch):
            length = int(lengths_FB[f, b])
            rows = weights_UD[inverse_N[n : n + length]]
            if per_id_N is not None:
                rows = rows * per_id_N[n : n + length, None]
            pooled = rows.sum(dim=0)
            row.append(pooled / length if mean_F[f] and length else pooled)
            n += length
        out.append(torch.stack(row))
    return torch.stack(out, dim=1)


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 999),
    weighted=st.booleans(),
    dim=st.sampled_from([1, 5, 64]),
    lengths=st.sampled_from([np.int32, np.int64]),
    divisor=st.sampled_from([1, 2, 3]),
)
def test_pool_and_its_gradients(seed, weighted, dim, lengths, divisor):
    random = np.random.default_rng(seed)
    lengths_FB = random.integers(0, 4, (3, 4)).astype(lengths)
    count = int(lengths_FB.sum())
    inverse_N = random.permutation(np.concatenate([np.arange(min(count, 5)), random.integers(0, 5, max(0, count - 5))]))
    inverse_N = inverse_N.astype(np.int64)
    rows = int(inverse_N.max()) + 1 if count else 0
    weights_UD = torch.from_numpy(random.standard_normal((rows, dim)).astype(np.float32)).requires_grad_()
    per_id_N = torch.from_numpy(random.standard_normal(count).astype(np.float32)).requires_grad_()
    mean_F = np.array([False, True, False])
    numbers = per_id_N.detach().numpy()
    wanted = plain(weights_UD, inverse_N, lengths_FB, per_id_N if weighted else None, mean_F)
    out = np.empty((4, 3, dim), np.float32)
    cut = int(random.integers(0, rows + 1))
    parts = [weights_UD.detach().numpy()[:cut], weights_UD.detach().numpy()[cut:]]
    pooling.pool(parts, inverse_N, lengths_FB, numbers, weighted, mean_F, out)
    np.testing.assert_allclose(out, wanted.detach().numpy(), rtol=1e-5, atol=1e-5)

    gradient = torch.from_numpy(random.standard_normal(out.shape).astype(np.float32))
    if count:
        wanted.backward(gradient)
    rows_UD, seen = np.full((rows, dim), 7, np.float32), np.zeros(rows, np.bool_)
    finite = pooling.pool_backward(
        gradient.numpy(), inverse_N, lengths_FB, numbers, weighted, mean_F, np.float32(divisor), seen, rows_UD
    )
    assert finite and seen.all()
    if count:
        np.testing.assert_allclose(rows_UD * divisor, weights_UD.grad.numpy(), rtol=1e-5, atol=1e-5)
    if weighted and count:
        out_N = np.empty(count, np.float32)
        pooling.per_id_backward(gradient.numpy(), weights_UD.detach().numpy(), inverse_N, lengths_FB, mean_F, out_N)
        np.testing.assert_allclose(out_N, per_id_N.grad.numpy(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dim", [1, 3, 4, 15, 16, 23, 63, 64, 70, 128, 199])  # every mix of blocks of columns
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("half", [False, True])
def test_sums_are_those_of_one_id_after_the_other_bit_for_bit(dim, weighted, half):
    random = np.random.default_rng(dim)
    rows_UD = random.standard_normal((40, dim), np.float32) * 10.0 ** random.integers(-6, 6, (40, dim))
    rows_UD = np.where(random.random((40, dim)) < 0.3, np.float32(-0.0), rows_UD.astype(np.float32))
    stored_UD = (rows_UD.view(np.uint32) >> 16).astype(np.uint16) if half else rows_UD
    rows_UD = (stored_UD.astype(np.uint32) << 16).view(np.float32) if half else rows_UD
    lengths_FB = random.permutation(np.arange(8).repeat(3)).reshape(4, 6)
    count, mean_F = int(lengths_FB.sum()), np.array([False, True, False, True])
    inverse_N, per_id_N = random.integers(0, 40, count), random.standard_normal(count, np.float32)
    wanted_BFD, n = np.zeros((6, 4, dim), np.float32), 0
    for (f, b), length in np.ndenumerate(lengths_FB):
        for i in range(n, n + length):
            value_D = per_id_N[i] * rows_UD[inverse_N[i]] if weighted else rows_UD[inverse_N[i]]
            wanted_BFD[b, f] = value_D if i == n else wanted_BFD[b, f] + value_D
        if mean_F[f] and length:
            wanted_BFD[b, f] /= np.float32(length)
        n += length
    out_BFD = np.full((6, 4, dim), np.nan, np.float32)
    pooling.pool([stored_UD[:7], stored_UD[7:]], inverse_N, lengths_FB, per_id_N, weighted, mean_F, out_BFD)
    assert dim == 1 or np.signbit(wanted_BFD[wanted_BFD == 0]).any()
    assert np.array_equal(out_BFD.view(np.uint32), wanted_BFD.view(np.uint32))


def test_bfloat16_rows_are_what_they_stand_for():
    weights = torch.randn(6, 8)
    halves = weights.bfloat16()
    lengths, inverse, mean = np.array([[2, 1, 0, 3]]), np.arange(6), np.array([False])
    outs = [np.empty((4, 1, 8), np.float32) for _ in range(2)]
    none = np.empty(0, np.float32)
    for out, rows in zip(outs, (halves.view(torch.uint16).numpy(), halves.float().numpy()), strict=True):
        pooling.pool([rows[:2], rows[2:]], inverse, lengths, none, False, mean, out)
    assert np.array_equal(*outs) and outs[0].any()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_gradient_that_is_not_finite_is_told(value):
    gradient = np.ones((2, 1, 4), np.float32)
    lengths, inverse, mean = np.array([[1, 1]]), np.array([0, 1]), np.array([False])

    def finite():
        rows, seen = np.empty((2, 4), np.float32), np.zeros(2, np.bool_)
        none = np.empty(0, np.float32)
        return pooling.pool_backward(gradient, inverse, lengths, none, False, mean, np.float32(1), seen, rows)

    assert finite()
    gradient[1, 0, 3] = value
    assert not finite()


def test_table_group_rows_and_the_first_id_that_is_none():
    lengths = np.array([[2, 0], [1, 1]])
    first, rows, out = np.array([0, 10]), np.array([10, 5]), np.empty(4, np.int64)
    for ids in (np.array([3, 9, 0, 4]), np.array([3, 9, 0, 4], np.int32)):
        assert pooling.to_table_group_rows(ids, lengths, first, rows, out) == -1
        assert out.tolist() == [3, 9, 10, 14]
    assert pooling.to_table_group_rows(np.array([3, 10, 0, 4]), lengths, first, rows, out) == 1
    assert pooling.to_table_group_rows(np.array([3, 9, 0, -1]), lengths, first, rows, out) == 3


def test_warm_compiles_all(monkeypatch):
    pooling.warm()
    kernels = [f for f in vars(pooling).values() if hasattr(f, "signatures")]
    assert len(kernels) >= 4 and all(kernel.signatures for kernel in kernels)
