"""The field against galois, exhaustively; the code by every submatrix and erasure pattern; folds against encoding.

The kernels are also compiled for other processors: the bits are the same.
"""

import functools
import hashlib
import itertools
import os
import platform
import subprocess
import sys

import galois
import llvmlite.binding
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torch_ecrec import codec
from torch_ecrec.codec import LinearCode, fold_rows_, xor_rows_
from torch_ecrec.codec.field import BLOCK_BYTES, FACTORS, PRODUCT, combine

WIDTHS = (4, 8, 12, 64, 68, 260)


@functools.cache
def field():
    """The field, made when a test first asks: galois compiles for seconds, and each process that runs tests is here."""
    return galois.GF(2**8)


def GF(elements):
    return field()(elements)


def random_bytes(seed, *shape):
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


# ---------------------------------------------------------------------------------------------------------------- field


def test_product_table_is_that_of_galois():
    everything = GF(np.arange(256, dtype=np.uint8))
    assert field().irreducible_poly == galois.Poly.Int(0x11D)
    assert np.array_equal(PRODUCT, np.asarray(np.multiply.outer(everything, everything)))


def test_field_axioms_hold_for_all_elements():
    a = np.arange(256)
    assert np.array_equal(PRODUCT, PRODUCT.T)
    assert np.array_equal(PRODUCT[1], a) and not PRODUCT[0].any()
    assert all(sorted(PRODUCT[c]) == list(range(256)) for c in range(1, 256)), "multiplying by c != 0 is a bijection"
    for c in range(256):
        assert np.array_equal(PRODUCT[c][PRODUCT], PRODUCT[PRODUCT[c]]), "associative"
        assert np.array_equal(PRODUCT[c][a[:, None] ^ a[None, :]], PRODUCT[c][:, None] ^ PRODUCT[c][None, :]), (
            "distributive"
        )


def test_a_fold_of_every_pair_of_elements():
    source, rows = np.arange(256, dtype=np.uint8).reshape(4, 64), np.arange(4)
    start = random_bytes(1, 4, 64)
    for c in range(256):
        target = start.copy()
        fold_rows_(target, rows, source, np.full(4, c, np.uint8))
        assert np.array_equal(target, start ^ PRODUCT[c][source]), c


@pytest.mark.parametrize("width", WIDTHS)
def test_row_kernels_match_the_table(width):
    rows = np.array([5, -1, 0, 19, 7, 3, -1, 18, 2, 11, 12, 13, 14], np.int64)
    target, source = random_bytes(2, 20, width), random_bytes(3, len(rows), width)
    coefficients = np.array([1, 7, 0, 255, 2, 1, 1, 29, 128, 3, 1, 0, 77], np.uint8)
    wanted = target.copy()
    for row, value, c in zip(rows, source, coefficients, strict=True):
        if row >= 0:
            wanted[row] ^= PRODUCT[c][value]
    folded = target.copy()
    fold_rows_(folded, rows, source, coefficients)
    assert np.array_equal(folded, wanted)

    wanted = target.copy()
    wanted[rows[rows >= 0]] ^= source[rows >= 0]
    xored = target.copy()
    xor_rows_(xored, rows, source)
    assert np.array_equal(xored, wanted)


@pytest.mark.parametrize("width", range(4, 4 * 34, 4))
def test_row_kernels_at_every_number_of_words(width):
    """Vectors of 16 words, then 8, 4, 2 and 1: every mixture of them, and no byte beside the row is touched."""
    rows = np.array([3, 0, 1])
    target, source, coefficients = (
        random_bytes(14, 5, width),
        random_bytes(15, 3, width),
        np.array([1, 133, 2], np.uint8),
    )
    wanted = target.copy()
    wanted[rows] ^= np.asarray(GF(coefficients)[:, None] * GF(source))
    folded = target.copy()
    fold_rows_(folded, rows, source, coefficients)
    assert np.array_equal(folded, wanted)

    wanted = target.copy()
    wanted[rows] ^= source
    xored = target.copy()
    xor_rows_(xored, rows, source)
    assert np.array_equal(xored, wanted)


@pytest.mark.parametrize("records, width", [(0, 8), (1, 4), (3, 12), (7, 36), (5, 260), (333, 260)])
@pytest.mark.parametrize("shape", [(1, 1), (1, 3), (2, 2), (3, 5), (0, 2)])
def test_combine_matches_galois(records, width, shape):
    coefficients, sources = random_bytes(16, *shape), random_bytes(17, shape[1], records, width)
    coefficients[:1] = 1
    coefficients[-1:, -1:] = 0
    assert sources[0].size < BLOCK_BYTES or sources[0].size > 2 * BLOCK_BYTES, "within a block, or in several"
    result = combine(coefficients, sources)
    assert result.shape == (shape[0], records, width) and result.dtype == np.uint8
    if result.size:
        wanted = GF(coefficients) @ GF(sources.reshape(shape[1], -1))
        assert np.array_equal(result.reshape(shape[0], -1), np.asarray(wanted))
    wide = np.concatenate([sources, sources], axis=2)
    assert np.array_equal(combine(coefficients, list(wide[:, :, :width])), result), "strided sources"
    misaligned = [np.frombuffer(b"x" + source.tobytes(), np.uint8)[1:].reshape(records, width) for source in sources]
    assert np.array_equal(combine(coefficients, misaligned), result)


def test_combine_refuses_what_does_not_fit():
    sources = random_bytes(18, 2, 3, 8)
    for coefficients in (np.ones(2, np.uint8), np.ones((1, 3), np.uint8), np.ones((1, 2), np.int64)):
        with pytest.raises(ValueError, match="coefficients_RK"):
            combine(coefficients, sources)
    with pytest.raises(ValueError, match="one shape"):
        combine(np.ones((1, 2), np.uint8), [sources[0], sources[1, :2]])
    with pytest.raises(ValueError, match="multiple of 4"):
        combine(np.ones((1, 2), np.uint8), random_bytes(18, 2, 3, 6))
    with pytest.raises(ValueError, match="empty"):
        combine(np.ones((1, 0), np.uint8), [])


def test_both_forms_of_every_factor_are_its_product():
    x = np.arange(256)
    for c in range(256):
        columns, rows = (FACTORS[c : c + 1, form].astype("<u8").view(np.uint8) for form in range(2))
        assert np.array_equal(columns, PRODUCT[c, 1 << np.arange(8)])
        parities = np.bitwise_count(rows[::-1, None] & x) & 1  # Intel's GF2P8AFFINEQB: bit i is the parity of row 7 - i
        assert np.array_equal((parities << np.arange(8)[:, None]).sum(axis=0), PRODUCT[c])


OTHER_PROCESSOR = """
import numpy as np
from torch_ecrec.codec.field import PRODUCT, combine, fold_rows_
from torch_ecrec.codec.packing import pack, unpack
from torch_ecrec.codec.seals import seals_of
random = np.random.default_rng(0)
for width in (4, 12, 56, 60, 64, 124, 128, 260):
    target, source = random.integers(0, 256, (2, 256, width), dtype=np.uint8)
    rows, coefficients = random.permutation(256), np.arange(256, dtype=np.uint8)
    wanted = target.copy()
    wanted[rows] ^= PRODUCT[coefficients[:, None], source]
    fold_rows_(target, rows, source, coefficients)
    assert np.array_equal(target, wanted), width
    wanted = PRODUCT[7, target] ^ PRODUCT[200, source]
    assert np.array_equal(combine(np.array([[7, 200]], np.uint8), [target, source])[0], wanted), width
deltas = random.integers(0, 1 << 31, 4000) >> random.integers(8, 31, 4000)
packed, found = pack(deltas.astype(np.uint32).view(np.uint8)), np.empty(16000, np.uint8)
unpack(np.concatenate([packed, np.zeros(16, np.uint8)]), len(packed), found)
assert np.array_equal(found.view(np.uint32), deltas), "packed and unpacked"
print(packed.tolist())
print([seals_of(random.integers(0, 256, (9, 4 * words), dtype=np.uint8)).tolist() for words in range(1, 70)])
"""


@functools.cache
def as_here():
    return subprocess.run([sys.executable, "-c", OTHER_PROCESSOR], capture_output=True, text=True, timeout=600).stdout


@pytest.mark.parametrize("name, features", [("x86-64", ""), ("haswell", "+avx,+avx2"), ("tremont", "+gfni")])
def test_the_bits_are_the_same_as_compiled_for_another_processor(name, features, tmp_path):
    if platform.machine() != "x86_64":
        pytest.skip("those processors are x86-64")
    have = llvmlite.binding.get_host_cpu_features()
    if not all(have.get(feature[1:], False) for feature in features.split(",") if feature):
        pytest.skip(f"this processor lacks some of {features}")
    numba = {"NUMBA_CPU_NAME": name, "NUMBA_CPU_FEATURES": features, "NUMBA_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", OTHER_PROCESSOR],
        env={**os.environ, **numba},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == as_here() and len(as_here()) > 1000, "seals differ"


def test_a_row_that_comes_twice_is_changed_twice():
    target, source = random_bytes(4, 2, 8), random_bytes(5, 3, 8)
    changed = target.copy()
    xor_rows_(changed, np.array([1, 1, 1]), source)
    assert np.array_equal(changed[1], target[1] ^ source[0] ^ source[1] ^ source[2])
    assert np.array_equal(changed[0], target[0])


def test_sources_may_be_strided_misaligned_or_read_only():
    target, wide = random_bytes(6, 5, 8), random_bytes(7, 4, 16)
    rows = np.array([4, 0, 1, 2])
    misaligned = np.frombuffer(b"x" + wide[:, :8].tobytes(), np.uint8)[1:].reshape(4, 8)
    frozen = wide[:, :8].copy()
    frozen.setflags(write=False)
    wanted = target.copy()
    wanted[rows] ^= wide[:, :8]
    for source in (wide[:, :8], misaligned, frozen):
        changed = target.copy()
        xor_rows_(changed, rows, source)
        assert np.array_equal(changed, wanted)


def test_empty_batches_change_nothing():
    target = random_bytes(8, 3, 8)
    before = target.copy()
    empty_rows, empty = np.zeros(0, np.int64), np.zeros((0, 8), np.uint8)
    xor_rows_(target, empty_rows, empty)
    fold_rows_(target, empty_rows, empty, np.zeros(0, np.uint8))
    assert np.array_equal(target, before)


def test_kernels_refuse_what_does_not_fit():
    target, source, rows = random_bytes(9, 3, 8), random_bytes(10, 2, 8), np.array([0, 1])
    before = target.copy()
    for outside in (3, -2, 2**40):
        with pytest.raises(IndexError, match=rf"rows_U\[1\].*-1\.\.2.*{outside}"):
            xor_rows_(target, np.array([0, outside]), source)
        with pytest.raises(IndexError):
            fold_rows_(target, np.array([0, outside]), source, np.ones(2, np.uint8))
    with pytest.raises(ValueError, match="multiple of 4"):
        xor_rows_(random_bytes(9, 3, 6), rows, random_bytes(9, 2, 6))
    with pytest.raises(ValueError, match="source_UB"):
        xor_rows_(target, rows, source[:1])
    with pytest.raises(ValueError, match="int64"):
        xor_rows_(target, rows.astype(np.int32), source)
    with pytest.raises(ValueError, match="uint8"):
        xor_rows_(target.view(np.uint32), rows, source)
    with pytest.raises(ValueError, match="contiguous"):
        xor_rows_(random_bytes(9, 3, 16)[:, :8], rows, source)
    with pytest.raises(ValueError, match="coefficients_U"):
        fold_rows_(target, rows, source, np.ones(3, np.uint8))
    assert np.array_equal(target, before)


# ----------------------------------------------------------------------------------------------------------------- code


@pytest.mark.parametrize("r", (1, 2, 3, 4))
def test_every_k_of_n_submatrix_is_invertible(r):
    for k in range(1, 11):
        code = LinearCode(k, r)
        # The rows of identity that are kept only strike columns: what is left to prove is that every square
        # submatrix of the coefficients is regular.
        for size in range(1, min(k, r) + 1):
            if size == 1:
                assert code.coefficients.all()
                continue
            for rows in itertools.combinations(range(r), size):
                for columns in itertools.combinations(range(k), size):
                    assert np.linalg.det(GF(code.coefficients[np.ix_(rows, columns)])) != 0, (k, r, rows, columns)


def test_every_k_of_n_submatrix_literally_for_small_codes():
    for k, r in itertools.product(range(1, 5), range(1, 4)):
        code = LinearCode(k, r)
        for have in itertools.combinations(range(k + r), k):
            assert np.linalg.matrix_rank(GF(code.generator[list(have)])) == k, (k, r, have)


@pytest.mark.parametrize("k, r", [(1, 0), (3, 0), (1, 1), (2, 1), (10, 1), (2, 2), (10, 4), (100, 100)])
def test_the_generator_is_systematic_and_its_first_parity_plain_xor(k, r):
    code = LinearCode(k, r)
    assert (code.k, code.r, code.n) == (k, r, k + r)
    assert code.coefficients.shape == (r, k) and code.generator.shape == (k + r, k)
    assert np.array_equal(code.generator[:k], np.eye(k)) and np.array_equal(code.generator[k:], code.coefficients)
    assert (code.coefficients[:1] == 1).all() and (code.coefficients[:, :1] == 1).all()
    assert code.generator.dtype == code.coefficients.dtype == np.uint8
    assert len({row.tobytes() for row in code.generator}) == code.n or k == 1, "no two parities alike"


# The first 16 hexadecimal digits of SHA-256 of the coefficients. What is kept by one version is decoded by the next.
GOLDEN = {
    (1, 2): "9dcf97a184f32623",
    (2, 2): "195c9750441d005f",
    (3, 2): "20f6dd3b8fd74de6",
    (4, 2): "173e6c9f23b3a4a2",
    (5, 3): "7a2cfa7bd9a2e181",
    (6, 3): "6bf9994bffce2204",
    (8, 4): "52cbe47de69b7f8a",
    (10, 4): "14d4888c5f1fe9a5",
    (16, 4): "42b49835f8fc6616",
    (32, 8): "6f95a5cc6ef8633a",
    (100, 28): "5c855a5b139f2d45",
    (200, 56): "aaefca5815692699",
    (1, 255): "175be60de5d178d0",
    (254, 2): "8e2b1b50f56ab200",
    (2, 254): "2147fba36e897a53",
}


@pytest.mark.parametrize("k, r", GOLDEN)
def test_the_coefficients_stay_what_they_are(k, r):
    assert hashlib.sha256(LinearCode(k, r).coefficients.tobytes()).hexdigest()[:16] == GOLDEN[k, r]


def test_the_coefficients_are_those_of_galois():
    """1 / (x + y), each column divided by its first element, then each row."""
    for k, r in [*itertools.product(range(1, 13), range(2, 6)), (100, 28), (17, 239)]:
        matrix = GF(np.ones((r, k), np.uint8)) / (GF(np.arange(k, k + r))[:, None] + GF(np.arange(k))[None, :])
        matrix /= matrix[:1, :]
        matrix /= matrix[:, :1]
        assert np.array_equal(LinearCode(k, r).coefficients, np.asarray(matrix)), (k, r)


@pytest.mark.parametrize("k, r", [(4, 2), (10, 4), (100, 28)])
def test_decode_rows_are_those_of_galois(k, r):
    code, generator = LinearCode(k, r), np.random.default_rng(k)
    for _ in range(5):
        members = generator.permutation(k + r)
        have, want = members[:k], int(members[k])
        wanted = GF(code.generator[[want]]) @ np.linalg.inv(GF(code.generator[have]))
        assert np.array_equal(code.decode_row(have, want), np.asarray(wanted)[0])


def test_a_code_is_made_without_galois():
    """It takes a second to import and to compile, which a process that joins has not got: its lease runs."""
    code = (
        "import sys\n"
        "from torch_ecrec.codec import LinearCode\n"
        "LinearCode(10, 4).decode_row((1, 2, 3, 4, 5, 6, 7, 8, 9, 13), 0)\n"
        "print('galois' in sys.modules)\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600, check=True)
    assert run.stdout.split() == ["False"]


@settings(max_examples=40, deadline=None)
@given(
    k=st.integers(1, 6),
    r=st.integers(0, 3),
    records=st.integers(0, 9),
    words=st.integers(1, 9),
    seed=st.integers(0, 99),
)
def test_encode_matches_galois(k, r, records, words, seed):
    code = LinearCode(k, r)
    data = random_bytes(seed, k, records, 4 * words)
    parity = code.encode(data)
    assert parity.shape == (r, records, 4 * words) and parity.dtype == np.uint8
    if r and records:
        wanted = GF(code.coefficients) @ GF(data.reshape(k, -1))
        assert np.array_equal(parity.reshape(r, -1), np.asarray(wanted))
    assert np.array_equal(parity, code.encode(list(data)))


@pytest.mark.parametrize("k, r", [(1, 1), (1, 3), (2, 1), (2, 2), (3, 2), (4, 1), (4, 2), (3, 3), (5, 3)])
def test_decode_every_member_from_every_k_others(k, r):
    code = LinearCode(k, r)
    data = random_bytes(k + 10 * r, k, 700 if k + r < 5 else 9, 260)  # 700 are more than one block
    members = [*data, *code.encode(data)]
    assert all(member.any() for member in members)
    for have in itertools.combinations(range(k + r), k):
        shuffled = have[1:] + have[:1]
        values = [members[m] for m in shuffled]
        for want in set(range(k + r)) - set(have):
            assert np.array_equal(code.decode(shuffled, values, want), members[want]), (have, want)


def test_decode_matches_galois_solve():
    code = LinearCode(4, 3)
    data = random_bytes(11, 4, 3, 8)
    members = [*data, *code.encode(data)]
    have = [6, 1, 5, 4]
    solved = np.linalg.solve(GF(code.generator[have]), GF(np.stack([members[m] for m in have]).reshape(4, -1)))
    for want in (0, 2, 3):
        assert np.array_equal(code.decode(have, [members[m] for m in have], want).reshape(-1), np.asarray(solved[want]))


@settings(max_examples=30, deadline=None)
@given(
    k=st.integers(1, 5),
    r=st.integers(1, 3),
    seed=st.integers(0, 99),
    steps=st.lists(st.tuples(st.integers(0, 4), st.lists(st.integers(0, 7), unique=True)), min_size=1, max_size=6),
)
def test_folding_every_change_equals_encoding_again(k, r, seed, steps):
    code = LinearCode(k, r)
    data = random_bytes(seed, k, 8, 20)
    parity = code.encode(data)
    generator = np.random.default_rng(seed + 1)
    for member, changed in steps:
        member %= k
        rows = np.array(changed, np.int64)
        new = generator.integers(0, 256, (len(rows), 20), dtype=np.uint8)
        delta = data[member, rows] ^ new
        data[member, rows] = new
        for i in range(r):
            code.fold_(parity[i], rows, delta, np.full(len(rows), code.coefficients[i, member], np.uint8))
    assert np.array_equal(parity, code.encode(data))


def test_missing_members_count_as_zeros():
    code = LinearCode(3, 2)
    data = random_bytes(12, 3, 4, 8)
    data[2] = 0
    parity = code.encode(data)
    assert np.array_equal(code.decode([1, 2, 4], [data[1], data[2], parity[1]], 0), data[0])


@pytest.mark.parametrize("k, r", [(1, 2), (2, 1), (3, 2), (4, 1), (4, 3)])
@pytest.mark.parametrize("width", (4, 260))
def test_decode_rows_writes_what_is_wanted_and_nothing_else(k, r, width):
    code, random = LinearCode(k, r), np.random.default_rng(k + r)
    data = random_bytes(k * r, k, 60, width)
    members = [*data, *code.encode(data)]
    for have in itertools.combinations(range(k + r), k):
        want = next(member for member in range(k + r) if member not in have)
        rows = np.concatenate([np.arange(20, 60), random.permutation(20)])  # a run, and some here and there
        target, wanted = random_bytes(1, 70, width), random.random(70) < 0.7
        expected, missing = target.copy(), wanted * random.integers(1, 4, 70, np.uint8)  # any of them but zero
        for i, row in enumerate(rows):
            if wanted[row]:
                expected[row] = members[want][i]
        count = code.decode_rows_(target, rows, missing, have, [members[m] for m in have], want)
        assert np.array_equal(target, expected) and count == wanted[:60].sum()
        assert not missing[:60].any() and np.array_equal(missing[60:] > 0, wanted[60:])


def test_decode_rows_refuses_what_does_not_fit():
    code, target, wanted = LinearCode(2, 1), np.zeros((3, 8), np.uint8), np.ones(3, np.uint8)
    rows, value = np.arange(2), np.ones((2, 8), np.uint8)
    for outside in (-1, 3):
        with pytest.raises(IndexError, match=rf"rows_U\[1\]` must be in 0\.\.2, got {outside}"):
            code.decode_rows_(target, np.array([0, outside]), wanted, [1, 2], [value, value], 0)
    for flags in (wanted[:2], wanted.view(np.bool_)):
        with pytest.raises(ValueError, match="wanted_N"):
            code.decode_rows_(target, rows, flags, [1, 2], [value, value], 0)
    with pytest.raises(ValueError, match="coefficients_K"):
        code.decode_rows_(target, rows, wanted, [1, 2], [value], 0)
    with pytest.raises(ValueError, match="source_UB"):
        code.decode_rows_(target, rows, wanted, [1, 2], [value, value[:1]], 0)
    assert not target.any() and wanted.all()


def test_the_code_refuses_what_does_not_fit():
    for k, r, name in ((0, 1, "k"), (1, -1, "r"), (200, 57, r"k \+ r")):
        with pytest.raises(ValueError, match=name):
            LinearCode(k, r)
    with pytest.raises(TypeError, match="k"):
        LinearCode(2.0, 1)
    code = LinearCode(2, 1)
    value = random_bytes(13, 3, 8)
    for have, want, message in (
        ([0], 2, "k = 2"),
        ([0, 0], 2, "distinct"),
        ([0, 3], 2, r"0\.\.2"),
        ([0, 1], 1, "want"),
        ([0, 1], 3, "want"),
        ([0, 1], -1, "want"),
    ):
        with pytest.raises(ValueError, match=message):
            code.decode(have, [value] * len(have), want)
    with pytest.raises(ValueError, match="values"):
        code.decode([0, 1], [value], 2)
    with pytest.raises(ValueError, match="one shape"):
        code.decode([0, 1], [value, value[:2]], 2)
    with pytest.raises(ValueError, match="k = 2"):
        code.encode(random_bytes(13, 3, 2, 8))


def test_decode_coefficients_are_cached_and_read_only():
    code = LinearCode(3, 2)
    first = code.decode_row([0, 3, 4], 2)
    assert code.decode_row((0, 3, 4), 2) is first
    with pytest.raises(ValueError, match="read-only"):
        first[0] = 1


def test_warm_leaves_nothing_to_compile():
    from torch_ecrec.codec import field

    codec.warm()
    kernels = (field._xor_rows, field._fold_rows, field._combine, field._combine_rows)
    before = [len(kernel.signatures) for kernel in kernels]
    target, source, rows = np.zeros((2, 260), np.uint8), np.ones((2, 260), np.uint8), np.arange(2)
    xor_rows_(target, rows, source)
    fold_rows_(target, rows, source, np.array([1, 2], np.uint8))
    LinearCode(2, 1).encode([target, source])
    LinearCode(2, 2).encode(np.stack([target, source])[:, ::2])
    LinearCode(2, 2).decode([0, 3], [target, source], 1)
    LinearCode(2, 2).decode_rows_(target, rows, np.ones(2, np.uint8), [0, 3], [source, source], 1)
    assert all(before) and before == [len(kernel.signatures) for kernel in kernels]
