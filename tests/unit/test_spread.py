"""How the tables of a job are spread over its slots: counted row by row, whatever the layout."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from torch_ecrec.spec.job import CodeSpec, JobSpec, OptimizerSpec, TableSpec
from torch_ecrec.spec.spread import said_of_padding, spread_of

SGD, ADAM = OptimizerSpec("sgd"), OptimizerSpec("adam")
CODES = [CodeSpec(3, 2, 1), CodeSpec(5, 3, 2), CodeSpec(7, 2, 1), CodeSpec(4, 4, 1, "none"), CodeSpec(1, 1, 1, "none")]


def job_of(tables, code):
    made = [
        TableSpec(f"t{i}", rows, 4, 0.0, 0.0, optimizer, sharding=sharding, pooling_factor=bag)
        for i, (rows, optimizer, sharding, bag) in enumerate(tables)
    ]
    return JobSpec(tuple(made), code, 1)


tables = st.tuples(
    st.integers(1, 60),
    st.sampled_from([SGD, ADAM]),
    st.sampled_from(["auto", "table_wise", "row_wise", "row_wise"]),
    st.sampled_from([1.0, 20.0]),
)


@settings(deadline=None)
@given(tables=st.lists(tables, min_size=1, max_size=8), code=st.sampled_from(CODES))
def test_rows_records_and_padding_are_those_of_the_layout(tables, code):
    job = job_of(tables, code)
    spread = spread_of(job)
    for one in spread.tables:
        table_group, first = job.place_of_table[one.table.name]
        slot_U, _ = job.layouts[table_group].locate(np.arange(first, first + one.table.rows))
        assert one.rows_S.tolist() == np.bincount(slot_U, minlength=code.slots).tolist()
        home = job.home_of(one.table.name)
        assert one.home == (None if home is None else home[0])
        assert [slot for low, high in one.slots for slot in range(low, high + 1)] == sorted(set(slot_U.tolist()))
        assert all(later[0] > before[1] + 1 for before, later in zip(one.slots, one.slots[1:], strict=False)), "runs"
    both = list(zip(job.table_groups, job.layouts, strict=True))
    held = [
        sum(of.data_rows(slot) * table_group.schema.nbytes for table_group, of in both) for slot in range(code.slots)
    ]
    assert (spread.records_S + spread.padding_S).tolist() == held
    assert np.isclose(spread.load_S.sum(), sum(table.wanted.load for table in job.tables))


def test_the_example_of_the_docstring():
    spread = spread_of(job_of([(6, SGD, "table_wise", 1.0), (9, SGD, "auto", 1.0)], CodeSpec(3, 2, 1)))
    whole, dealt = spread.tables
    assert (whole.rows_S.tolist(), whole.home, whole.slots) == ([6, 0, 0], 0, [(0, 0)])
    assert (dealt.rows_S.tolist(), dealt.home, dealt.slots) == ([0, 5, 4], None, [(1, 2)])
    assert spread.records_S.tolist() == [96, 80, 64] and spread.padding_S.tolist() == [0, 16, 32]


def test_padding_by_hand_is_said_with_what_to_do_instead():
    job = job_of([(6000, SGD, "table_wise", 1.0), (500, SGD, "auto", 1.0)], CodeSpec(3, 2, 1))
    spread = spread_of(job)
    assert spread.records_S.sum() == 6500 * 16 and spread.padding_S.sum() == (3 * 6000 - 6500) * 16
    assert said_of_padding(job) == (
        "table t0 is whole on one slot by `erasure_coded_table_wise`, which has more than its share of the rows then."
        " All slots are as large as the largest: that makes 0.184 MB of padding, 177% of the records, and 0.092 MB"
        " of parity of it. `erasure_coded` keeps whole what fits, and deals out the rest; with fewer slots a share is"
        " larger"
    )
    assert said_of_padding(job_of([(6000, SGD, "auto", 1.0), (500, SGD, "auto", 1.0)], job.code)) == ""
    assert said_of_padding(job_of([(600, SGD, "table_wise", 1.0), (50, SGD, "auto", 1.0)], job.code)) == "", "a toy"


def test_padding_of_less_than_a_twentieth_is_not_said_nor_is_what_rounding_makes():
    others = [(100_000, SGD, "row_wise", 1.0)] * 2
    for rows, said in ((100_000, False), (105_000, False), (109_000, True)):  # a share is a third
        job = job_of([(rows, SGD, "table_wise", 1.0), *others], CodeSpec(3, 2, 1))
        share = spread_of(job).padding_S.sum() / spread_of(job).records_S.sum()
        assert (share >= 0.05) == said == bool(said_of_padding(job)), (rows, share)
    small = job_of([(1, SGD, "table_wise", 1.0), (1, SGD, "auto", 1.0)], CodeSpec(3, 2, 1))
    assert spread_of(small).padding_S.sum() and said_of_padding(small) == "", "each slot has its share"


def test_padding_of_another_table_group_is_not_of_tables_that_fit():
    job = job_of(
        [(3, ADAM, "table_wise", 1.0), (6000, SGD, "table_wise", 1.0), (1, SGD, "auto", 1.0)], CodeSpec(3, 2, 1)
    )
    assert said_of_padding(job).startswith("tables t0, t1 are whole")
    job = job_of([(300, ADAM, "table_wise", 1.0), (700, ADAM, "auto", 1.0), (6000, SGD, "table_wise", 1.0)], job.code)
    assert said_of_padding(job).startswith("table t2 is whole")
