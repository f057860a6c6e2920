"""Measures what it costs training to be watched: open pages and a scrape a second, beside nobody.

One cluster trains, and systems take turns in it, as in `bench train`: nobody looks; `--pages` pages are open and
/metrics is read every `--scrape-every` seconds; nobody looks, once more. What the last of these has beside the first is
the machine's noise. Ratios are of blocks of the same round; `CPU` is that of all processes per step.

A page is a connection to /events that takes all that it is sent, as a browser's does. What a browser then draws costs
the coordinator nothing, and is mostly done on another machine: here the pages are read and not looked at. What that
takes (`readers`) competes with training. `coordinator` is the CPU time of its process per second, with all of its
threads: heartbeats, statuses, and what it serves.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import TYPE_CHECKING, Any

import psutil

from torch_ecrec.bench import record
from torch_ecrec.bench.experiment import Experiment, Model, Part, Running, Stopped, cpu_s, parse_mode
from torch_ecrec.bench.train import Blocks, add_blocks, add_shape, blocks_of, shape_of
from torch_ecrec.processes.children import free_port
from torch_ecrec.runtime.checks import require
from torch_ecrec.runtime.threads import Worker, log_error
from torch_ecrec.web.place import Place
from torch_ecrec.web.server import STREAMS_MOST

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NOBODY, WATCHED, AGAIN = "nobody", "watched", "nobody again"
WANTED = 0.99  # of the samples a second that there are while nobody looks
OPEN_S = 60.0  # until each page has its first status: only a hang reaches it
READ_BYTES = 1 << 16
STATUS = b"event: status\n"
LONGEST_S = 10.0  # for one scrape


class Watchers:
    """Pages and a scraper of one coordinator, on a thread of their own. Use as a context manager.

    Entering returns once each page has its status. Whatever ends a page or a scrape early is raised at the end.

    Args:
        place: where it serves.
        pages: connections to /events.
        every_s: between two scrapes.

    Attributes:
        counts: statuses, scrapes and received_bytes so far, of all of them together.
        cpu_s: of the thread, once it has ended.

    Raises:
        Stopped: not every page got a status in time, or one ended early.
    """

    def __init__(self, place: Place, pages: int, every_s: float) -> None:
        self._place, self._pages, self._every_s = place, pages, every_s
        self.counts = dict.fromkeys(("statuses", "scrapes", "received_bytes"), 0)
        self.cpu_s = 0.0
        self._there = 0
        self._all_there, self._stop = threading.Event(), asyncio.Event()
        self._loop = asyncio.new_event_loop()
        self._error: BaseException | None = None
        self._thread = Worker(self._run, "watchers", log_error)

    def __enter__(self) -> Watchers:
        self._thread.start()
        if not self._all_there.wait(OPEN_S) or self._error is not None:
            there = self._there
            self._end()
            raise Stopped(f"{there} of {self._pages} pages got a status: {self._error}")
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._end()
        if kind is None and self._error is not None:
            raise Stopped(f"a page or a scrape has ended early: {self._error}")

    def _end(self) -> None:
        with contextlib.suppress(RuntimeError):  # it has ended
            self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    def _run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
                runner.run(self._watch())
        except* (OSError, EOFError, TimeoutError) as errors:
            self._error = errors.exceptions[0]
        finally:
            self._all_there.set()

    async def _watch(self) -> None:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._page()) for _ in range(self._pages)]
            tasks.append(group.create_task(self._scrape()))
            await self._stop.wait()
            for task in tasks:
                task.cancel()
        self.cpu_s = time.thread_time()

    @contextlib.asynccontextmanager
    async def _asked(self, path: str, more: str = "") -> Any:
        """Asks for something, and gives what is sent."""
        reader, writer = await asyncio.open_connection(self._place.host, self._place.port)
        try:
            writer.write(f"GET {path} HTTP/1.1\r\nHost: {self._place.host}\r\n{more}\r\n".encode())
            if not (line := await reader.readline()).startswith(b"HTTP/1.1 200 "):
                raise EOFError(f"{path} is answered with {line!r}")
            yield reader
        finally:
            writer.close()

    async def _page(self) -> None:
        async with self._asked("/events") as reader:
            there, end = False, b""  # of what came before: a word may be cut in two
            while piece := await reader.read(READ_BYTES):
                self.counts["received_bytes"] += len(piece)
                found = (end + piece).count(STATUS)
                self.counts["statuses"] += found
                end = piece[1 - len(STATUS) :]
                if found and not there:
                    there = True
                    self._there += 1
                    if self._there == self._pages:
                        self._all_there.set()
        raise EOFError("the coordinator has ended /events")

    async def _scrape(self) -> None:
        while True:
            async with asyncio.timeout(LONGEST_S), self._asked("/metrics", "Connection: close\r\n") as reader:
                while piece := await reader.read(READ_BYTES):
                    self.counts["received_bytes"] += len(piece)
            self.counts["scrapes"] += 1
            await asyncio.sleep(self._every_s)


class Watching:
    """Turns of `Blocks`, while somebody looks or nobody does.

    Args:
        blocks: of all systems.
        place: where the coordinator serves.
        pages, every_s: of who looks.
    """

    def __init__(self, blocks: Blocks, place: Place, pages: int, every_s: float) -> None:
        self.blocks, self.place, self.pages, self.every_s = blocks, place, pages, every_s

    def warm_up(self, running: Running, part: Part) -> None:
        """Called before the first turn of a part; they all train in the same processes."""
        if not self.blocks.steps:
            self.blocks.warm_up(running, part)

    @contextlib.contextmanager
    def _looking(self, watched: bool) -> Iterator[dict[str, float]]:
        """Who looks is there meanwhile, and what they got is told afterwards, for each second."""
        found: dict[str, float] = dict.fromkeys(("statuses", "scrapes", "received_bytes", "readers"), 0.0)
        if not watched:
            yield found
            return
        with Watchers(self.place, self.pages, self.every_s) as watchers:
            begin_s, before = time.monotonic(), dict(watchers.counts)
            yield found
            seconds, after = time.monotonic() - begin_s, dict(watchers.counts)
        found.update({name: (after[name] - before[name]) / seconds for name in before})
        found["readers"] = watchers.cpu_s / seconds

    def turn(self, watched: bool, running: Running) -> dict[str, Any]:
        """Trains one block; returns its figures, and those of who looked."""
        coordinator = running.cluster.coordinator.pid
        pids = [coordinator, *(child.pid for child in psutil.Process(coordinator).children(recursive=True))]
        with self._looking(watched) as looked:
            begin_s, before = time.monotonic(), cpu_s(pids)
            block = self.blocks.turn(running.mode, running)
            spent = (cpu_s(pids) - before) / (time.monotonic() - begin_s)
        return {**block, "coordinator": spent, "looked": looked}


def rows(found: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """Returns the table: a row for each system, with the ratio of its blocks to those in which nobody looked."""
    lines = []
    for name, blocks in found.items():
        ratios, cpu = (
            [one[figure] / other[figure] for one, other in zip(blocks, found[NOBODY], strict=False)]
            for figure in ("samples_per_s", "cpu_s_per_step")
        )
        if not ratios:
            continue
        lines.append(
            {
                "system": name,
                "samples/s": median(one["samples_per_s"] for one in blocks),
                f"rate / {NOBODY}": median(ratios),
                "least": min(ratios),
                "most": max(ratios),
                f"CPU / {NOBODY}": median(cpu),
                "coordinator ms/s": 1e3 * median(one["coordinator"] for one in blocks),
                "most ms/s": 1e3 * max(one["coordinator"] for one in blocks),
                "readers ms/s": 1e3 * median(one["looked"]["readers"] for one in blocks),
                "statuses/s": median(one["looked"]["statuses"] for one in blocks),
                "scrapes/s": median(one["looked"]["scrapes"] for one in blocks),
                "KB/s": median(one["looked"]["received_bytes"] for one in blocks) / 1e3,
            }
        )
    return lines


def draw(lines: Sequence[Mapping[str, Any]], title: str) -> Figure:
    """Plots the rate of each system beside nobody's, and what the coordinator takes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 0.5 * len(lines) + 1.6), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    names, rates = [line["system"] for line in lines], [line[f"rate / {NOBODY}"] for line in lines]
    low = [rate - line["least"] for rate, line in zip(rates, lines, strict=True)]
    high = [line["most"] - rate for rate, line in zip(rates, lines, strict=True)]
    left.barh(names, rates, xerr=[low, high], color="#2b6cb0", ecolor="#333333", capsize=2)
    left.set_xlabel("samples/s, of those while nobody looks")
    right.barh(names, [line["coordinator ms/s"] for line in lines], color="#2b6cb0")
    right.set_xlabel("CPU ms of the coordinator per second")
    left.invert_yaxis()
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title)
    return figure


def run(arguments: argparse.Namespace) -> int:
    """Measures, prints and writes watching-SHAPE.json, .csv and .png, with the label in their names.

    Raises:
        ValueError, TypeError: bad arguments; nothing was started.
    """
    shape = shape_of(arguments)
    record.require_counts(arguments, "trainers", "pages")
    record.require_positive(arguments, "scrape_every")
    require(arguments.pages <= STREAMS_MOST, f"`--pages` must be at most {STREAMS_MOST}, got {arguments.pages}")
    mode, place = parse_mode(arguments.system), Place("127.0.0.1", free_port())
    require(mode.code is not None, f"`--system` must be one with servers of ours, got {arguments.system}")
    model = Model(shape, arguments.trainers, arguments.seed)
    blocks = blocks_of(arguments)
    watching, serves = Watching(blocks, place, arguments.pages, arguments.scrape_every), ("--http", str(place))
    experiment = Experiment(
        record.labelled(f"watching-{arguments.shape}", arguments),
        arguments.out,
        [
            Part(name, mode, model, [functools.partial(watching.turn, name == WATCHED)], coordinator=serves)
            for name in (NOBODY, WATCHED, AGAIN)
        ],
        repeats=arguments.blocks,
        together=True,
        begin=watching.warm_up,
        after=lambda name, block: print(
            f"{name}: {block['samples_per_s']:,.0f} samples/s, the coordinator {1e3 * block['coordinator']:.1f} ms/s",
            flush=True,
        ),
    )
    experiment.run()
    lines = rows(experiment.found)
    ratio = next((line[f"rate / {NOBODY}"] for line in lines if line["system"] == WATCHED), None)
    aims = [record.aim(f"samples/s with {arguments.pages} pages, of those with none", ">=", WANTED, ratio)]
    content = {
        "pages": arguments.pages,
        "scrape_every_s": arguments.scrape_every,
        "system": arguments.system,
        "trainers": arguments.trainers,
        "steps_per_block": blocks.steps,
        "blocks": experiment.found,
        "aims": aims,
    }
    title = f"Watched by {arguments.pages} pages, {arguments.shape}, {arguments.system}"
    shown = f"{record.table(lines)}\n\n{record.table(aims)}"
    return experiment.finish(content, lines, shown, lambda: draw(lines, title), arguments.json)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `torch-ecrec bench watching`."""
    parser.add_argument("--pages", type=int, default=50, metavar="N", help="that are open (default 50)")
    parser.add_argument("--scrape-every", type=float, default=1.0, metavar="S", help="seconds (default 1)")
    parser.add_argument("--system", default="k2r1", help="that trains, as `bench train` calls it (default k2r1)")
    add_shape(parser)
    add_blocks(parser, warmup=20)
    record.add_files(parser, "build/bench", copies=True)
