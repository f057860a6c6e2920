"""The arithmetic of `bench outages`, and what it refuses before anything starts."""

import argparse
from pathlib import Path
from typing import Any

import pytest

from torch_ecrec.bench import outage_figures as figures
from torch_ecrec.bench import outages
from torch_ecrec.bench.recovery_figures import Steps


def steps(*ends_s: float) -> Steps:
    """Of one trainer, one after the other."""
    found = Steps(1)
    for begin_s, end_s in zip((0.0, *ends_s), ends_s, strict=False):
        found.add(0, begin_s, end_s)
    return found


# Ten steps of 1 s, a pause of 3 s in which a server goes at 10.5, steps of 1 s, and one of 2 s for no reason.
RUN = steps(*range(1, 11), *range(13, 30), 31, 32)
EVENT: dict[str, Any] = {
    "before_s": (2.0, 10.0),
    "event_s": 10.5,
    "after_s": (14.0, 22.0),
    "control_s": (23.0, 31.5),
    "detected": 11.0,
    "placed": 11.5,
    "repaired": 14.0,
    "unhealthy": 3,
}


def test_what_an_event_says() -> None:
    found = figures.figures(EVENT, RUN)
    assert found["longest_s"] == 3.0 and found["median_s"] == 1.0 and found["calm_s"] == 2.0
    assert found["longest / median"] == 3.0 and found["calm / median"] == 2.0
    assert (found["detected_s"], found["placed_s"], found["repaired_s"]) == (0.5, 1.0, 3.5)
    assert found["steps_per_s"] == pytest.approx(1.0) and found["after / before"] == pytest.approx(1.0)
    assert found["during / around"] is None and found["unhealthy"] == 3


def test_a_drain_has_a_rate_of_its_own() -> None:
    found = figures.figures({**EVENT, "detected": None, "during_s": (10.0, 14.0)}, RUN)
    around = (8 + 8 + RUN.rate(23.0, 31.5) * 8.5) / (8 + 8 + 8.5)
    assert around < 1.0 and found["during / around"] == pytest.approx(0.5 / around)
    assert found["detected_s"] is None


def test_the_worst_counts_where_it_is_wanted() -> None:
    events = [figures.figures(EVENT, RUN), {**figures.figures(EVENT, RUN), "longest_s": 0.25}]
    aims = {line["figure"]: line for line in figures.targets({figures.KILL: events, figures.HOST: events})}
    kill = aims[f"{figures.KINDS[figures.KILL]}: longest_s, worst"]
    assert (kill["wanted"], kill["measured"], kill["reached"]) == ("<= 0.5", 3.0, "no")
    assert aims[f"{figures.KINDS[figures.HOST]}: longest_s, worst"]["reached"] == "yes"
    assert aims[f"{figures.KINDS[figures.DRAIN]}: unhealthy, worst"]["reached"] == "-", "it was not measured"
    (line,) = figures.rows({figures.KILL: events, figures.CUT: []})
    assert line["times"] == 2 and line["longest_s"] == 1.625 and line["longest_s worst"] == 3.0


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--events", "flood"], "unknown events flood"),
        (["--events", "kill,kill"], "named twice"),
        (["--repeats", "0"], "must be at least 1"),
        (["--drain-gigabytes", "0"], "`drain_gigabytes` must be positive"),
        (["-r", "0"], "."),
    ],
)
def test_bad_arguments_start_nothing(words: list[str], says: str, tmp_path: Path) -> None:
    parser = argparse.ArgumentParser()
    outages.add_arguments(parser)
    with pytest.raises(ValueError, match=says):
        outages.run(parser.parse_args([*words, "--out", str(tmp_path)]))
    assert not list(tmp_path.iterdir())
