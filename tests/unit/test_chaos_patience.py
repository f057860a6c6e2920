"""How long chaos waits for a cluster: without progress, and not for the machine."""

import os
import sys

import pytest

from torch_ecrec.demo.chaos.patience import MOST, Patience, waited_s


def looks(patience: Patience, seconds: int, waits_s: float = 0.0, progress_s: int = 0) -> None:
    """A second between two looks, in which process 1 waits for a core for so long, and 2 never does."""
    patience.begin()
    for now_s in range(seconds + 1):
        mark = now_s // progress_s if progress_s else 0
        patience.look(float(now_s), mark, {1: 100.0 + waits_s * now_s, 2: 7.0})


def test_who_hangs_has_the_limit_and_no_more() -> None:
    patience = Patience()
    looks(patience, 120)
    assert not patience.is_over(120.0) and patience.is_over(119.0)
    patience.begin()
    assert not patience.is_over(0.0)


def test_while_somebody_gets_no_core_little_time_passes() -> None:
    patience = Patience()
    looks(patience, 600, waits_s=0.9)
    assert patience.vain_s == pytest.approx(60.0) and not patience.is_over(120.0)
    looks(patience, 1300, waits_s=0.9)
    assert patience.is_over(120.0), "who hangs beside others that wait for cores is found out, too"
    looks(patience, 10, waits_s=5.0)
    assert patience.vain_s == 0.0, "several threads may have waited at once; time does not go back"


def test_with_progress_the_time_begins_anew_but_not_for_ever() -> None:
    patience = Patience()
    looks(patience, 119 * MOST, progress_s=100)
    assert not patience.is_over(120.0)
    looks(patience, 121 * MOST, progress_s=100)
    assert patience.is_over(120.0), "who comes and goes makes progress without end"


def test_a_process_that_has_just_come_counts_from_its_start_and_one_that_ended_not_at_all() -> None:
    patience = Patience()
    patience.look(0.0, 0, {1: 50.0})
    patience.look(1.0, 0, {2: 0.75})
    assert patience.vain_s == pytest.approx(0.25)


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
def test_linux_tells_how_long_a_process_waited() -> None:
    gone = 2**22 + 1  # no process can have this number
    found = waited_s([os.getpid(), gone])
    assert list(found) == [os.getpid()] and found[os.getpid()] >= 0.0
