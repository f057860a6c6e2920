"""Text for people: sizes, tables, and a coordinator's status."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch_ecrec.protocol.status import (
    CheckpointsStatus,
    Connections,
    ExperimentStatus,
    Late,
    MemberStatus,
    PartialStatus,
    SavesStatus,
    SlotReport,
    SpreadStatus,
    Status,
)

TABLES_SHOWN = 12  # of more, a status says where they lie only if it is asked to


def size(count: float) -> str:
    """Returns bytes as people read them: 812 B, 3.4 MiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            break
        count /= 1024
    return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"


def table(rows: list[list[str]], indent: str = "  ") -> list[str]:
    """Returns rows as an aligned table. The first one is the head. Columns of figures are aligned to the right."""
    columns = list(zip(*rows, strict=True))
    widths = [max(map(len, column)) for column in columns]
    right = [any(c[:1].isdigit() for c in column[1:]) for column in columns]
    return [
        indent
        + "  ".join(
            cell.rjust(width) if to_right else cell.ljust(width)
            for cell, width, to_right in zip(row, widths, right, strict=True)
        ).rstrip()
        for row in rows
    ]


def format_status(status: Status, tables: bool = False) -> str:
    """Returns a coordinator's status as text: the cluster, a line per slot, a line per table, a line per member.

    Args:
        tables: there are lines of tables even if there are more than `TABLES_SHOWN`.
    """
    code = status.code
    protection = f"(k, r) = ({code.k}, {code.r})" if code.protection == "parity" else "no protection"
    lines = [
        f"torch-ecrec {status.version}: {protection} on {code.slots} slots, {status.tables} tables,"
        f" epoch {status.epoch}, roster {status.roster}, step {status.step}"
    ]
    reports = status.slot_reports()
    if status.experiment is not None:
        lines.append(format_experiment(status.experiment, list(reports.values())))
    lines += _troubles(status)
    if status.checkpoints is not None:
        lines += format_checkpoints(status.checkpoints)
        if status.checkpoints.saves is not None:
            lines += format_saves(status.checkpoints.saves, list(reports.values()))
    if status.move is not None:
        lines.append(f"slot {status.move.slot} moves to {status.move.server}, and goes on where it is")
    lacking = "" if status.gathering is None else format_gathering(status.gathering.servers, status.gathering.trainers)
    lines += _slots(status, reports) if status.slots else [f"  no slots placed yet{lacking}"]
    if status.spread is not None:
        shown = tables or len(status.spread.tables) <= TABLES_SHOWN
        lines += ["", *_tables(status.spread)] if shown else ["  where the tables lie: torch-ecrec status --tables"]
    lines += ["", *_members(status)] if status.members else ["  no members"]
    return "\n".join(lines)


def _troubles(status: Status) -> list[str]:
    """Returns a line for each thing that is wrong."""
    lines = []
    if status.fatal:
        lines.append(f"STOPPED: {status.fatal}")
    elif status.finished:
        lines.append("the job has ended: all its trainers were done")
    if (stands := status.stands_still) is not None:
        limit = "until somebody is heard" if stands.left_s is None else f"for {stands.left_s:.0f} s at most"
        lines.append(f"STANDS STILL, waits for silent members, {limit}:")
        lines += [f"  {name}: {why}" for name, why in sorted(stands.why.items())]
    lines += [f"CUT: {one.who} cannot reach {one.whom}, for {one.for_s:.1f} s" for one in status.unreachable]
    if status.unresolved.pairs:
        lines.append(f"TRAINING CANNOT GO ON until they can: {status.unresolved.why}")
    lines += [f"AT RISK: if {one.domain} is lost, {one.why}" for one in status.at_risk]
    lines += [format_slow(one, one.slow) for one in status.members if one.slow is not None and one.alive]
    if status.cannot_begin:
        lines.append(f"has nothing to begin with, and refuses whoever joins: {status.cannot_begin}")
    elif status.looks:
        lines.append("looks for a checkpoint to begin with: whoever joins waits until it is found, or there is none")
        lines += [f"  not yet: {status.store_trouble}"] if status.store_trouble else []
    if status.partial is not None:
        lines.append(format_partial(status.partial))
    return lines + [f"NOT EXACT from step {one.step} on: {one.what}" for one in status.inexact]


def _slots(status: Status, reports: Mapping[int, SlotReport]) -> list[str]:
    rows = [["slot", "server", "incarnation", "state", "step", "watermark", "records", "parity", "logs", "snapshots"]]
    spread = status.spread
    rows[0] += [] if spread is None else ["records/mean", "load/mean"]
    for place in status.slots:
        own = reports.get(place.slot)
        if own is not None and own.incarnation != place.incarnation:
            own = None
        state = "healthy" if place.healthy else "waiting" if not place.server else "starting"
        if own is not None and not place.healthy:
            state = f"rebuilding {own.rebuilt:.0%}"
        cells = [str(place.slot), place.server or "(nobody)", str(place.incarnation), state]
        if own is None:
            cells += ["-"] * 6
        else:
            sizes = (own.record_bytes, own.parity_bytes, own.log_bytes, own.snapshot_bytes)
            cells += [str(own.step), str(own.watermark), *map(size, sizes)]
        cells += [] if spread is None else [f"{spread.records[place.slot]:.2f}", f"{spread.load[place.slot]:.2f}"]
        rows.append(cells)
    return table(rows)


def _tables(spread: SpreadStatus) -> list[str]:
    rows = [["table", "rows", "dim", "lies on", "long bags"]]
    for one in spread.tables:
        bags = "pooled there" if one.pooled else "as rows"
        rows.append([one.name, str(one.rows), str(one.dim), lies_on(one.slots), bags])
    return table(rows)


def lies_on(runs: Sequence[tuple[int, int]]) -> str:
    """Returns slots as text, of runs (first, last) of them: "slot 2", "slots 0-2, 4"."""
    told = [str(first) if first == last else f"{first}-{last}" for first, last in runs]
    return f"slot{'s' * (len(told) > 1 or '-' in told[0])} {', '.join(told)}"


def _members(status: Status) -> list[str]:
    rows = [["member", "role", "pid", "state", "silent", "connections"]]
    for member in status.members:
        state = "spare" if member.spare else "serving" if member.role == "server" else "training"
        if not status.slots:
            state = "waiting"
        elif member.report.awaits:
            state = f"waits for {trainers_named(member.report.awaits)}"
        state += ", draining" if member.draining else ""
        state += ", slow" if member.slow is not None else ""
        state = "left" if member.left else state if member.alive else "lost"
        silent = f"{member.silent_s:.1f} s" if member.present else "-"
        ways = format_connections(member.report.connections or Connections())
        rows.append([member.name, member.role, str(member.pid), state, silent, ways])
    return table(rows)


def trainers_named(ranks: Sequence[int]) -> str:
    """Returns trainers by rank as text: "trainer 1", "trainers 1, 3"."""
    return f"trainer{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def format_gathering(of_servers: Sequence[int], of_trainers: Sequence[int], join: str = "HOST:PORT") -> str:
    """Returns what a cluster still lacks to begin, and how to start it.

    Args:
        of_servers, of_trainers: those that are there, and those that it takes.
        join: the address of its coordinator.
    """
    (servers, slots), (trainers, of) = of_servers, of_trainers
    said = [f"{servers} of {slots} servers", f"{trainers} of {of} trainers" if of else f"{trainers} trainers"]
    hints = [f"a server is started by: torch-ecrec serve --join {join}"] if servers < slots else []
    if trainers < max(of, 1):
        hints.append(f"a trainer is a script that is started with TORCH_ECREC_JOIN={join}")
    return f": {' and '.join(said)} are there; {'; '.join(hints)}"


def format_slow(member: MemberStatus, slow: Late) -> str:
    """Returns a text that names a server for which training waits, and what to do about it."""
    name = member.name
    remedy = f"to move its slots to a spare: torch-ecrec drain {name}"
    if member.draining:
        remedy = "its slots are being moved away" if not member.spare else "it has no slot any more, and may be stopped"
    return (
        f"SLOW: training waits for {name} {slow.share:.0%} of the time: it answers {slow.late_s:.2f} s later than"
        f" most others, which take {slow.usual_s:.3f} s; {remedy}"
    )


def format_connections(said: Connections) -> str:
    """Returns the ways by which a member's data travels to and from others, with the number of each."""
    ways = [(said.memory, "in memory"), (said.tcp, "over TCP"), (said.rpc, "over torch RPC")]
    told = [f"{count} {text}" for count, text in ways if count]
    if said.bytes_packed:
        told.append(f"packed to {1 - said.bytes_saved / said.bytes_packed:.0%} where it pays")
    return ", ".join(told) or "-"


def format_experiment(experiment: ExperimentStatus, slots: Sequence[SlotReport]) -> str:
    """Returns a text that names a cluster's experiment, what it gives up, and what came of that so far."""
    named = [experiment.mode] if experiment.mode else []
    named += [f"ranges={experiment.ranges}"] if experiment.ranges else []
    lost, wrong = sum(slot.lost_steps for slot in slots), sum(slot.wrong_stripes for slot in slots)
    return (
        f"EXPERIMENT {', '.join(named)}: {'; '.join(experiment.gives_up)}."
        f" So far {lost} acknowledged steps of slots are lost, {wrong} stripes were wrong"
    )


def format_partial(partial: PartialStatus) -> str:
    """Returns what partial recoveries have lost, as text."""
    slots = ", ".join(map(str, partial.last_slots))
    saves = f" and {partial.last_saves} saves on it" if partial.last_saves else ""
    return (
        f"NOT EXACT: {partial.lost_samples:.3%} of lost samples (CPR) by {partial.times} partial recoveries;"
        f" the last: slots {slots} took their records from checkpoint {partial.last}, of step"
        f" {partial.last_step}{saves}"
    )


def format_checkpoints(said: CheckpointsStatus) -> list[str]:
    """Returns a text about a cluster's checkpoints: the last that counts, one under way, and what is wrong."""
    last = "none yet in this run"
    if said.last_age_s is not None:
        last = f"the last is of step {said.last_step}, {said.last_age_s:.0f} s ago"
    lines = [f"checkpoints at {said.url}: {last}" + (f"; writing {said.running}" if said.running else "")]
    if said.failing_for_s is not None:
        lines.append(f"  FAILING for {said.failing_for_s:.0f} s, is tried again: {said.failing}")
    return lines


def format_saves(said: SavesStatus, slots: Sequence[SlotReport]) -> list[str]:
    """Returns a text about the prioritised saves since the checkpoint, and the memory that their savers take."""
    last = f", the last of step {said.last_step}" if said.saves else ""
    memory = size(sum(slot.saver_bytes for slot in slots))
    longest_ms = 1e3 * max((slot.saver_pick_s for slot in slots), default=0.0)
    lines = [
        f"  saves of {said.portion:.1%} of the rows ({said.saver}) since then: {said.saves}{last}; savers have"
        f" {memory}, and picked within {longest_ms:.1f} ms"
    ]
    if said.failing:
        lines.append(f"  the last save FAILED, is tried again: {said.failing}")
    return lines
