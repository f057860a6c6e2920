"""`bench operators` on tiny sizes: what it writes, and that all alternatives do the same work; never how fast."""

import pytest
import torch
from benches import result, run

from torch_ecrec.bench import operators

OURS_ALONE = {  # the rivals there are
    "unique rows": ["torch"], "to slots": ["fbgemm"],
    "pooled at the slot": ["fbgemm"], "step of bags at the slot": ["fbgemm"],
}  # fmt: skip


@pytest.fixture(autouse=True)
def threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_it_measures_every_operator_and_its_rivals_do_the_same(tmp_path, capsys):
    words = ("--dims", 4, 16, "--ids", 1, 3, "--batch-size", 8, "--rows", 50, "--repeats", 2)
    assert run(operators, tmp_path, *words) == 0
    printed = capsys.readouterr().out
    content = result(tmp_path, "operators")
    rows = content["rows"]
    assert content["repeats"] == 2 and content["header"]["commit"]
    whats = list(dict.fromkeys(row["what"] for row in rows))
    assert [(row["dim"], row["ids"], row["what"]) for row in rows] == [
        (dim, ids, what) for dim in (4, 16) for ids in (1, 3) for what in whats
    ]
    assert "pooled, weights of ids, backward" in whats and "of 8 bits" in whats
    for row in rows:
        assert row["what"] in printed
        rivals = [rival for rival in operators.RIVALS if row[f"{rival}_ms"] is not None]
        assert rivals == OURS_ALONE.get(row["what"], ["fbgemm", "torch"])
        for name in [*rivals, *(["ours"] if row["ours_ms"] is not None else [])]:
            assert 0 < row[f"{name}_min"] <= row[f"{name}_ms"] <= row[f"{name}_max"]
        for rival in rivals:
            same = row[f"{rival}_same"]
            assert same in (None, "yes") or float(same) < 1e-4, (row["what"], rival, same)


def test_results_that_differ_are_told():
    assert operators._same(torch.ones(2), torch.ones(2)) == "yes"
    assert operators._same(torch.ones(2), torch.tensor([1.0, 1.5])) == "5.0e-01"


def test_sizes_are_checked(tmp_path):
    for words in (("--repeats", 0), ("--dims", 0), ("--ids", 0), ("--batch-size", 0)):
        with pytest.raises(ValueError, match="must be at least 1"):
            run(operators, tmp_path, *words)
