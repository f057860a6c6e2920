"""Runs the cells of an experiment: each is a mode with a model, workers and a seed.

Undisturbed cells of one model train in turns, block after block, so that noise of the machine meets all of them. Cells
with a kill run one after the other. What is here is put together of the parts of benchmarks (`bench/experiment.py`).

Two checkpoints cost the same whatever lies between them, so `Ckpt-30` and `Ckpt-60` are one system. In its turn it
trains a block, and then stands until a checkpoint is written, as fast as this machine's disk takes it. Into a store of
B bytes a second, of which there are three (`scale.BANDWIDTHS`), it would take at least its bytes / B; what it costs is
that time, divided by the time between two.

`Ckpt-30-beside` is written beside training, at the bandwidth of the middle store. It takes from training what is slower
meanwhile: the seconds that it takes, times 1 - the rate of the steps beside it / the rate of the other steps of the
same turn. That is work, of which a checkpoint makes the same into each store. So it is counted for each of them, but
for one into which a checkpoint takes longer than the time between two: there it cannot be had so often.
"""

from __future__ import annotations

import functools
import itertools
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch_ecrec.bench import checkpoint, record
from torch_ecrec.bench.checkpoint import Writing, written
from torch_ecrec.bench.experiment import WHOLE_S, Experiment, Model, Part, Running, Stopped
from torch_ecrec.bench.faults import GoBack, Kill, progress, start_training
from torch_ecrec.bench.places import Apart, Here, OnHosts
from torch_ecrec.bench.train import Blocks
from torch_ecrec.experiments import emulation, limits, modes, scale
from torch_ecrec.experiments.catalogue import Spec
from torch_ecrec.experiments.modes import Mode
from torch_ecrec.experiments.scale import Scale
from torch_ecrec.protocol.status import SlotReport
from torch_ecrec.spec.settings import Settings

KEPT = (
    "samples_per_s",
    "cpu_s_per_step",
    "server_cpu_s_per_step",
    "rss_bytes",
    "save_s",
    "bytes",
    "lost_s",
)  # of a block
WARM_UP = 2  # steps, twice, before the first block
LEAST_STEPS = 3
ROUNDS = 2  # of the scrubber after a kill: the first may have been under way
SAVED_EVERY = 4  # steps of a block, after which training stands for a checkpoint
SAVED_BESIDE = 16  # steps of a block, after a quarter of which a checkpoint is written beside them
STORE = "store"  # of the three, the one at whose bandwidth checkpoints are written where time is measured
EMULATED_S = 20.0  # of a cell without a cluster
START_S = 30.0  # of the processes of one system: for the time that is left
AGAIN_S = {"process": 8.0, "host": 12.0}  # for each kill after the first: until a spare is there again
SPARES = {"process": (1, None), "host": (4, 1)}  # and how many are enough for the next kill: a host takes long to start
MOMENT_S = {"process": 1.0, "host": 3.0}  # a kill comes at a random moment of so many: of a step over slow links, too
KILL_S = {True: 75.0, False: 45.0}  # of a cell with a kill besides what it trains, by whether all go back


@dataclass(frozen=True)
class Cell:
    """One of the runs that an experiment is made of."""

    experiment: str
    model: str
    mode: str
    workers: int
    seed: int
    failures: int = 0  # of an emulation

    @property
    def name(self) -> str:
        """Returns the name of the cell's file, without its ending."""
        failures = f"-f{self.failures}" if self.failures else ""
        return f"{self.model}-{self.mode}-w{self.workers}-s{self.seed}{failures}"


@dataclass(frozen=True)
class Group:
    """Cells that run at once: they differ in their modes only."""

    spec: Spec
    cells: Sequence[Cell]

    @property
    def modes(self) -> list[Mode]:
        """The modes of its cells, in order; none of an emulation."""
        return [] if self.spec.is_emulated else [modes.parse(cell.mode) for cell in self.cells]

    @property
    def name(self) -> str:
        """Of its logs, and in lines of progress."""
        first = self.cells[0]
        if self.spec.kind == "undisturbed":
            return f"{first.experiment}, {first.model}, w{first.workers}, s{first.seed}"
        return f"{first.experiment}, {first.name}"

    def seconds(self, factor: Scale) -> float:
        """Returns about how long it takes: what is told as the time that is left."""
        if self.spec.is_emulated:
            return EMULATED_S
        if self.spec.kind == "undisturbed":
            started, turns = {mode.trained.group for mode in self.modes}, {mode.system for mode in self.modes}
            return len(started) * START_S + len(turns) * (self.spec.repeats + 2) * self.spec.seconds
        (mode,) = self.modes
        each = 3 * self.spec.seconds + 2.5 * mode.interval_s / factor.time
        return KILL_S[bool(mode.interval_s)] + each + (self.spec.repeats - 1) * (AGAIN_S[self.spec.kills] + each)

    def run(self, factor: Scale, data: str | None, out: Path) -> dict[str, dict[str, Any]]:
        """Runs its cells.

        Args:
            factor: of the run.
            data: a file of Criteo rows, or None.
            out: folder for logs, and for checkpoints that are written meanwhile.

        Returns:
            For each cell, by its mode: its figures.

        Raises:
            Stopped: a cell failed; the message says which, and why.
        """
        if self.spec.is_emulated:
            (cell,) = self.cells
            options = self.spec.options
            if self.spec.kind == "emulated":
                return {cell.mode: emulation.cost(options, cell.mode, cell.seed)}
            return {cell.mode: emulation.quality(options, cell.mode, cell.seed, cell.failures, data)}
        run = _undisturbed if self.spec.kind == "undisturbed" else _killed
        return run(self, factor, data, out)

    def model(self, factor: Scale, data: str | None) -> Model:
        """Returns the model that the cell trains."""
        first = self.cells[0]
        return Model(factor.shape(first.model, data), first.workers, first.seed)


def groups(specs: Sequence[Spec]) -> list[Group]:
    """Returns all cells of some experiments, in the order in which they run."""
    found = []
    for spec in specs:
        for seed, workers, model in itertools.product(spec.seeds, spec.workers, spec.models):
            cells = [
                Cell(spec.name, model, mode, workers, seed, failures)
                for mode in spec.modes
                for failures in ([0] if mode == emulation.EXACT else spec.failures)  # they change nothing there
            ]
            found += [Group(spec, cells)] if spec.kind == "undisturbed" else [Group(spec, [cell]) for cell in cells]
    return found


# undisturbed ------------------------------------------------------------------------------------------


class StandingSaves:
    """Turns in which training stands while a checkpoint is written: of a block, and of the checkpoint after it.

    A checkpoint is due after the last step but one of each block, since its part of the dense model is sent when the
    next batch is drawn.
    """

    def __init__(self) -> None:
        self._done = 0

    def warm_up(self, running: Running) -> None:
        """Trains until the first checkpoint is written: it finds no file of before in the page cache."""
        self._train(running, SAVED_EVERY + 1)

    def turn(self, running: Running) -> dict[str, Any]:
        """Trains a block, and waits for its checkpoint; returns its figures. Raises `Stopped`."""
        return self._train(running, SAVED_EVERY)

    def _train(self, running: Running, steps: int) -> dict[str, Any]:
        answers = running.ask({"run": steps, "snapshot": SAVED_EVERY, "checkpoint": 0})
        self._done += steps
        event, begin_s, end_s = written(running, self._done - 1)
        seconds = max(answer["seconds"] for answer in answers)
        return {
            "samples_per_s": steps * running.model.samples / seconds,
            "save_s": end_s - begin_s,
            "bytes": event.bytes,
        }


def beside(writing: Writing, running: Running) -> dict[str, Any]:
    """Trains a block, beside which a checkpoint is written; returns its figures. Raises `Stopped`."""
    found = figures_beside(writing.turn("", running), running.model.samples)
    if found is None:
        raise Stopped(f"{running.part.name}: no step was trained beside a checkpoint, or all of them were")
    return found


def figures_beside(block: Mapping[str, Any], samples: int) -> dict[str, Any] | None:
    """Returns the figures of a block (`bench/checkpoint.py`) beside whose steps, but not all, a checkpoint was written.

    Returns:
        `samples_per_s` without one; `save_s` and `bytes` of it, and `lost_s`, the seconds of training that it took.
        None if there were no steps beside it, or no others.
    """
    there = checkpoint.beside(block)
    others = [step for step in range(len(block["ends_s"])) if step not in there]
    ((begin_s, end_s),), (size,) = block["spans_s"], block["bytes"]
    slow, calm = (checkpoint.rate(block, steps, samples) for steps in (there, others))
    if slow is None or calm is None:
        return None
    save_s = end_s - begin_s
    return {"samples_per_s": calm, "save_s": save_s, "bytes": size, "lost_s": save_s * (1 - slow / calm)}


def _undisturbed(group: Group, factor: Scale, data: str | None, out: Path) -> dict[str, dict[str, Any]]:
    model = group.model(factor, data)
    blocks, saves, writing = Blocks(WARM_UP, LEAST_STEPS, group.spec.seconds), StandingSaves(), Writing(SAVED_BESIDE)
    parts = []
    for mode in {mode.system: mode for mode in group.modes}.values():
        trained = mode.trained
        if mode.interval_s:
            assert trained.code is not None, "all modes are ours"
            every, rate = (
                (SAVED_BESIDE, scale.BANDWIDTHS[STORE] / trained.code.slots) if mode.beside else (SAVED_EVERY, 0)
            )
            store = ("--checkpoint", str(out / f"{mode.system}-store"), "--checkpoint-every", str(every))
            options = (*store, "--checkpoint-bytes-per-s", str(rate), "--checkpoint-keep", "1")
            turn = functools.partial(beside, writing) if mode.beside else saves.turn
            parts.append(Part(mode.system, trained, model, [turn], coordinator=options, watched=True))
        else:
            parts.append(Part(mode.system, trained, model, [functools.partial(_limited, mode, blocks)]))

    def begin(running: Running, part: Part) -> None:
        if part.name == "Ckpt-beside":
            writing.begin(running, part)
        else:
            saves.warm_up(running) if part.coordinator else blocks.warm_up(running, part)

    place = functools.partial(_place, group.spec)
    name = group.name.replace(", ", "-")
    experiment = Experiment(name, out, parts, group.spec.repeats, True, place, begin, _tell)
    found = experiment.results()
    base = found.get("XDL")
    return {
        cell.mode: figures_of_blocks(mode, found[mode.system], base, factor)
        for cell, mode in zip(group.cells, group.modes, strict=True)
    }


def _place(spec: Spec, part: Part) -> Here:
    """Returns where a part runs. Raises `Stopped` if hosts cannot be made here."""
    try:
        if spec.kills == "host":
            assert part.mode.code is not None, "servers are ours"
            return Apart(part.mode.code, part.spares, part.model.trainers, None, 1e6 * spec.link_mbit)
        return OnHosts(spec.hosts) if spec.hosts else Here()
    except ValueError as error:
        raise Stopped(str(error)) from error


def _limited(mode: Mode, blocks: Blocks, running: Running) -> dict[str, Any]:
    """Trains a block while the servers have what the mode leaves them. Raises `Stopped`."""
    with limits.applied(mode.limit, running):
        return blocks.turn(mode.trained, running)


def _tell(name: str, block: Mapping[str, Any]) -> None:
    saved = f", saved {block['bytes'] / 1e6:,.0f} MB in {block['save_s']:.2f} s" if "save_s" in block else ""
    print(f"  {name}: {block['samples_per_s']:,.0f} samples/s{saved}", flush=True)


def figures_of_blocks(
    mode: Mode, blocks: Sequence[Mapping[str, Any]], base: Sequence[Mapping[str, Any]] | None, factor: Scale
) -> dict[str, Any]:
    """Returns the figures of an undisturbed cell.

    Args:
        mode: of the cell.
        blocks: its turns.
        base: those of XDL in the same run; None: it has no XDL.
        factor: of the run.

    Returns:
        `samples_per_s`; `overhead`, the training time more than XDL's, of it, in the blocks of the same turn. Of
        checkpoints, `save_s` and `bytes`, and `overhead` by the name of the store; of those written beside training,
        `lost_s` as well, and only those stores that have taken one before the next is due.
    """
    figures: dict[str, Any] = {"samples_per_s": record.spread(block["samples_per_s"] for block in blocks)}
    if mode.interval_s:
        interval_s = mode.interval_s / factor.time
        figures |= {
            "interval_s": interval_s,
            "save_s": record.spread(block["save_s"] for block in blocks),
            "bytes": record.spread(block["bytes"] for block in blocks),
        }
        if mode.beside:
            most = max(block["bytes"] for block in blocks)
            figures["lost_s"] = record.spread(block["lost_s"] for block in blocks)
            share = record.spread(block["lost_s"] / interval_s for block in blocks)
            figures["overhead"] = {
                store: share for store, rate in scale.BANDWIDTHS.items() if most / rate <= interval_s
            }
        else:
            figures["overhead"] = {
                store: record.spread(max(block["save_s"], block["bytes"] / rate) / interval_s for block in blocks)
                for store, rate in scale.BANDWIDTHS.items()
            }
    elif base is not None and base is not blocks:
        pairs = zip(base, blocks, strict=True)
        figures["overhead"] = record.spread(one["samples_per_s"] / other["samples_per_s"] - 1 for one, other in pairs)
    return {**figures, "blocks": [{name: block[name] for name in KEPT if name in block} for block in blocks]}


# kills ------------------------------------------------------------------------------------------------


def _killed(group: Group, factor: Scale, data: str | None, out: Path) -> dict[str, dict[str, Any]]:
    (cell,), (mode,), spec = group.cells, group.modes, group.spec
    # not of the mode: each has the same slots killed, after the same times
    model, seed = group.model(factor, data), f"{cell.seed} {cell.model} {cell.workers}"
    code = mode.trained.code
    assert code is not None, "all modes are ours"
    if mode.interval_s:
        interval_s, rate = mode.interval_s / factor.time, scale.BANDWIDTHS[STORE] / code.slots
        store = ("--checkpoint", str(out / "store"), "--checkpoint-every", f"{interval_s}s", "--checkpoint-keep", "2")
        options = (*store, "--checkpoint-bytes-per-s", str(rate), "--beyond", "checkpoint")
        turn: Any = GoBack(interval_s, spec.seconds, seed)
        part = Part(mode.name, mode.trained, model, [turn], coordinator=options, watched=True)
    else:
        turn = Recovering(Kill(spec.seconds, seed, moment_s=MOMENT_S[spec.kills]), compares=spec.repeats > 1)
        spares, least = SPARES[spec.kills]
        part = Part(mode.name, mode.trained, model, [turn], spares=spares, least_spares=least, watched=True)
    place = functools.partial(_place, spec)
    experiment = Experiment(group.name.replace(", ", "-"), out, [part], spec.repeats, place=place, begin=start_training)
    (found,) = experiment.results().values()
    return {cell.mode: figures_of_kills([figures_of_recovery(mode, one) for one in found])}


class Recovering:
    """Turns in which a server is killed; the figures have the steps around it, and what it took for good.

    Args:
        kill: makes it happen.
        compares: each turn waits until every stripe was compared after the kill: else no wrong one only means that
            nobody has looked there.
    """

    def __init__(self, kill: Kill, compares: bool = False) -> None:
        self._kill, self._compares = kill, compares
        self._seen: dict[tuple[int, int], tuple[int, int]] = {}  # of each life of a slot: what it had counted

    def __call__(self, running: Running) -> dict[str, Any]:
        """Kills once, and returns the figures. Raises `Stopped`."""
        found = self._kill(running)
        if self._compares:
            with running.changed:
                lacks, most = unlooked(running), largest_slot_bytes(running)
            rate = Settings.from_environment().scrub_bytes_per_s
            if not rate:
                raise Stopped(
                    "stripes are never compared here, so nothing is known of wrong ones: see scrub_bytes_per_s"
                )
            seconds = WHOLE_S + 2 * ROUNDS * most / rate  # a server may have two slots
            running.until(lacks, seconds, "every stripe to be compared after the kill")
        with running.changed:
            assert running.record.status is not None, "it was whole a moment ago"
            lost_steps, wrong_stripes = self.news(running.record.status.slot_reports().values())
            steps = progress(running.steps, 0, found["kill_s"])
        return {**found, "progress": steps, "lost_steps": lost_steps, "wrong_stripes": wrong_stripes}

    def news(self, reports: Iterable[SlotReport]) -> tuple[int, int]:
        """Returns the steps lost, and the stripes found wrong, since it was called last: hosts count since they began.

        Args:
            reports: of all slots, now.
        """
        lost_steps = wrong_stripes = 0
        for one in reports:
            before = self._seen.get((one.slot, one.incarnation), (0, 0))
            lost_steps += one.lost_steps - before[0]
            wrong_stripes += one.wrong_stripes - before[1]
            self._seen[one.slot, one.incarnation] = one.lost_steps, one.wrong_stripes
        return lost_steps, wrong_stripes


def unlooked(running: Running) -> Callable[[], str]:
    """Returns what says which slots have not looked at all of their records and parities since now; "": all have.

    Both are called with the lock. A round that is under way may have passed a stripe before: the next one counts.
    """
    before = _rounds(running)

    def lacks() -> str:
        now = _rounds(running)
        some = [slot for (slot, life), rounds in now.items() if rounds < before.get((slot, life), 0) + ROUNDS]
        return "" if now and not some else f"the scrubber's rounds of slots {some}"

    return lacks


def largest_slot_bytes(running: Running) -> int:
    """Returns the bytes of records and parities of the largest slot; 0 as long as nothing is known."""
    status = running.record.status
    reports = () if status is None else status.slot_reports().values()
    return max((one.record_bytes + one.parity_bytes for one in reports), default=0)


def _rounds(running: Running) -> dict[tuple[int, int], int]:
    """Returns how often each life of a slot was looked through; 0 of one that has told nothing."""
    status, places = running.record.status, enumerate(running.record.places)
    reports = {} if status is None else status.slot_reports()
    found = {}
    for slot, (_, life) in places:
        one = reports.get(slot)
        found[slot, life] = one.scrub_rounds if one is not None and one.incarnation == life else 0
    return found


def figures_of_recovery(mode: Mode, found: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the figures of a cell with a kill, from those of its turn.

    Returns:
        `recovered_s`: seconds after the kill until training is as before, and where it would be: everything is rebuilt,
        or what a checkpoint had not is trained again. `share`: of its samples per second before, what new samples it
        trained until then. `progress`: pairs of seconds after the kill and steps that count.
    """
    goes_back = bool(mode.interval_s)
    return {
        "recovered_s": found["caught_up_s"] if goes_back else max(found["first_step_s"], found["rebuilt_s"]),
        "share": 0.0 if goes_back else found["during_share"],
        **found,
        "progress": thinned(found["progress"]),
    }


def figures_of_kills(kills: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the figures of a cell from those of each kill: medians, and of what was lost the sum; `kills` has all."""
    found: dict[str, Any] = {"kills": [{name: one[name] for name in one if name != "progress"} for one in kills]}
    for name in kills[0]:
        values = [one[name] for one in kills if isinstance(one[name], (int, float))]
        total = sum if name in ("lost_steps", "wrong_stripes") else statistics.median
        found[name] = total(values) if values else kills[0][name]
    return found


def thinned(points: Sequence[tuple[float, int]], most: int = 400) -> list[tuple[float, int]]:
    """Returns at most so many of the points, the first and the last among them."""
    if len(points) <= most:
        return list(points)
    return [points[round(i * (len(points) - 1) / (most - 1))] for i in range(most)]
