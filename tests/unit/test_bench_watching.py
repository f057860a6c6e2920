"""`bench watching`: who looks at a made up cluster, what is told of it, what is refused; never how fast anything is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from benches import refuses
from conftest import wait_until
from watched import MadeUp, watched

from torch_ecrec.bench import watching
from torch_ecrec.bench.experiment import Stopped
from torch_ecrec.bench.watching import AGAIN, NOBODY, WATCHED, Watchers, rows
from torch_ecrec.web.place import Place

LIMIT_S = 60.0


def test_every_page_gets_statuses_and_metrics_are_read() -> None:
    with watched(MadeUp()) as web, Watchers(Place(*web.address), 5, 0.05) as watchers:
        assert watchers.counts["statuses"] >= 5, "each has one before anything is measured"
        wait_until(lambda: watchers.counts["statuses"] >= 20 and watchers.counts["scrapes"] >= 3, LIMIT_S, "they go on")
    assert watchers.counts["received_bytes"] > 20 * 1000 and watchers.cpu_s > 0


def test_a_coordinator_that_ends_meanwhile_is_an_error() -> None:
    with watched(MadeUp()) as web:
        watchers = Watchers(Place(*web.address), 2, 60.0)
        with pytest.raises(Stopped, match="a page or a scrape has ended early"), watchers:
            web.close()
            wait_until(lambda: watchers._error is not None, LIMIT_S, "it is noticed")


def test_pages_that_get_no_status_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching, "OPEN_S", 0.5)
    silent = MadeUp()
    silent.silent = True
    with watched(silent) as web:
        watchers = Watchers(Place(*web.address), 2, 60.0)
        with pytest.raises(Stopped, match="0 of 2 pages got a status"), watchers:
            pass


def test_where_nobody_serves_it_is_said() -> None:
    with watched(MadeUp()) as web:
        place = Place(*web.address)
    with pytest.raises(Stopped, match="0 of 2 pages got a status: "), Watchers(place, 2, 1.0):
        pass


def test_ratios_are_of_blocks_of_one_round() -> None:
    def block(rate: float, coordinator: float, pages: float) -> dict[str, Any]:
        looked = {"statuses": pages, "scrapes": pages / 50, "received_bytes": 1e4 * pages, "readers": pages / 1e4}
        return {"samples_per_s": rate, "cpu_s_per_step": 1 / rate, "coordinator": coordinator, "looked": looked}

    found = {
        NOBODY: [block(100, 0.008, 0), block(50, 0.008, 0), block(10, 0.008, 0)],
        WATCHED: [block(99, 0.012, 50), block(49, 0.012, 50), block(20, 0.013, 50)],
        AGAIN: [block(100, 0.008, 0), block(55, 0.008, 0)],  # interrupted
    }
    nobody, seen, again = rows(found)
    assert nobody["rate / nobody"] == 1 and again["most"] == 1.1
    assert (seen["rate / nobody"], seen["least"], seen["most"]) == (0.99, 0.98, 2)
    assert seen["coordinator ms/s"] == pytest.approx(12) and seen["most ms/s"] == pytest.approx(13)
    assert seen["statuses/s"] == 50 and seen["KB/s"] == 500
    assert rows({NOBODY: [], WATCHED: [], AGAIN: []}) == []


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--pages 0", "`pages` must be at least 1"),
        ("--pages 65", "`--pages` must be at most 64, got 65"),
        ("--scrape-every 0", "`scrape_every` must be positive"),
        ("--system torchrec", "`--system` must be one with servers of ours"),
        ("--system what", "unknown system 'what'"),
        ("--blocks 0", "`blocks` must be at least 1"),
    ],
)
def test_bad_arguments_start_nothing(words: str, says: str, tmp_path: Path) -> None:
    refuses(watching, words.split(), says, tmp_path)
