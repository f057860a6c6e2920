"""`bench codec` on tiny sizes: what it writes, that rivals with other bytes are refused; never how fast anything is."""

import json

import numpy as np
import pytest
from benches import parse, result, run

from torch_ecrec.bench import codec
from torch_ecrec.codec import LinearCode

RATES = ("gbps", "memcpy_gbps", "scattered_copy_gbps", "isal_gbps")


class NoIsal:
    def __init__(self):
        raise OSError("no such library")


def test_it_measures_every_case_and_writes_what_it_prints(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(codec, "Isal", NoIsal)
    monkeypatch.setattr(codec, "CALL_BYTES", 1 << 16)
    monkeypatch.setattr(codec, "CACHED_BYTES", 1 << 12)
    more = tmp_path / "more.json"
    arguments = ("--codes", "2,1", "3,2", "--records", 64, 260, "--repeats", 2, "--memory-mib", 1)
    assert run(codec, tmp_path, *arguments, "--json", more) == 0
    printed = capsys.readouterr().out

    content = result(tmp_path, "codec")
    assert json.loads(more.read_text()) == content
    assert content["repeats"] == 2 and content["memory_mib"] == 1 and content["header"]["commit"]
    rows = content["rows"]
    cases = [(row["what"], row["k"], row["r"], row["place"], row["record_bytes"]) for row in rows]
    assert cases == [
        (what, k, r, place, width)
        for what in ("fold", "encode", "decode")
        for k, r in ((2, 1), (3, 2))
        for place in ("memory", "cache")
        for width in (64, 260)
    ]
    for row in rows:
        took_part = RATES[:3] if row["what"] == "fold" else RATES[:2]
        for rate in RATES:
            least, middle, most = (row[f"{rate}{edge}"] for edge in ("_min", "", "_max"))
            assert 0 < least <= middle <= most if rate in took_part else least is middle is most is None
        assert row["of_memcpy"] > 0 and (row["of_scattered_copy"] is None) == (row["what"] != "fold")
        writes = {"fold": 2, "encode": row["r"] / row["k"], "decode": 1 / row["k"]}[row["what"]]
        assert row["moved"] == pytest.approx(1 + writes) and row["memcpy_moved"] == 2
    assert (tmp_path / "codec.png").exists()
    assert (
        "left out: no such library" in printed and "of ISA-L" not in printed and len(printed.splitlines()) > len(rows)
    )


def test_isal_takes_part_where_it_is(tmp_path, monkeypatch, capsys):
    try:
        codec.Isal()
    except OSError:
        pytest.skip("no libisal.so.2")
    monkeypatch.setattr(codec, "CALL_BYTES", 1 << 16)
    monkeypatch.setattr(codec, "CACHED_BYTES", 1 << 12)
    arguments = ("--codes", "2,1", "4,3", "--records", 64, 260, "--repeats", 1, "--memory-mib", 1)
    assert run(codec, tmp_path, *arguments) == 0
    assert "of ISA-L" in capsys.readouterr().out
    assert all(row["isal_gbps"] > 0 for row in result(tmp_path, "codec")["rows"])


@pytest.mark.parametrize("what", ("encode", "fold"))
def test_a_rival_that_gives_other_bytes_is_refused(what):
    class Wrong:
        def tables(self, coefficients_RK):
            return coefficients_RK

        def encode_(self, result_RUB, tables, sources_KUB):
            result_RUB[:] = 0

        def fold_(self, parity_NB, rows_U, delta_UB, members_U, tables, k):
            pass

    pool = codec.Pool(1 << 16)
    code = LinearCode(2, 2)
    with pytest.raises(ValueError, match=f"{what} differs"):
        if what == "fold":
            codec._measure_fold(code, 64, "cache", pool, Wrong(), 1)
        else:
            codec._measure_sums(what, code, 64, "cache", pool, Wrong(), 1)


@pytest.mark.parametrize("place", codec.PLACES)
@pytest.mark.parametrize("width", (64, 260))
def test_folds_go_to_distinct_ascending_rows_spread_over_the_pool(place, width):
    parity, count, take = codec.Pool(1 << 20).rows(place, width)
    first, second = take(), take()
    for rows in (first, second):
        assert rows.shape == (count,) and rows.min() >= 0 and rows.max() < len(parity)
        assert (np.diff(rows) > 0).all() and (np.diff(rows) > 1).any()
        assert rows[0] < len(parity) / 8 and rows[-1] > len(parity) * 7 / 8
    assert not np.array_equal(first, second)


def test_windows_move_on_in_memory_and_stay_in_the_cache(monkeypatch):
    monkeypatch.setattr(codec, "CALL_BYTES", 1 << 15)
    pool = codec.Pool(1 << 16)
    assert len(np.unique(pool.bytes)) == 256
    for place, same in (("memory", False), ("cache", True)):
        take = pool.window(place, 2, 260)
        first, second = take(), take()
        assert first.shape == second.shape and first.shape[::2] == (2, 260)
        assert np.shares_memory(first, second) == same


def test_it_refuses_what_cannot_be_measured(tmp_path, capsys):
    for code in ("2", "0,1", "2,0", "200,100", "2,x"):
        with pytest.raises(SystemExit):
            parse(codec, "--codes", code)
        assert "a code" in capsys.readouterr().err
    for words, message in (
        (("--repeats", 0), "repeats"),
        (("--memory-mib", 0), "memory-mib"),
        (("--records", 6), "records"),
    ):
        with pytest.raises(ValueError, match=message):
            run(codec, tmp_path, *words)
