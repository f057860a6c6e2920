"""Words for people: sizes, times, tables, names, and what a status says of one thing."""

from __future__ import annotations

from collections.abc import Sequence

from torch_ecrec.protocol.status import (
    CheckpointsStatus,
    Connections,
    Late,
    MemberStatus,
    PartialStatus,
    SavesStatus,
    SlotReport,
    Status,
)


def size(count: float) -> str:
    """Returns bytes as people read them: 812 B, 3.4 MiB."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if count < 1024 or unit == "TiB":
            break
        count /= 1024
    return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"


def versions(status: Status) -> dict[str, list[str]]:
    """Returns which members run which version of the package, by version: of names, and "the coordinator"."""
    found: dict[str, list[str]] = {}
    for one in status.members:
        if one.present and one.version:
            found.setdefault(one.version, []).append(one.name)
    found.setdefault(status.version, []).append("the coordinator")
    return dict(sorted(found.items()))


def versions_named(status: Status) -> str:
    """Returns the same as text: "0.1.0: server-0, trainer-0; 0.1.1: server-1"."""
    return "; ".join(f"{version}: {', '.join(names)}" for version, names in versions(status).items())


def together(names: Sequence[object]) -> str:
    """Returns names as people read them: a and b. Of twice the same, which reaches nobody: a and anybody."""
    said = list(map(str, names))
    return f"{said[0]} and anybody" if len(said) == 2 and said[0] == said[1] else " and ".join(said)


def duration(seconds: float) -> str:
    """Returns a time as people read it: 0.4 s, 12 s, 3 min 20 s, 2 h 5 min."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 120:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    if minutes < 60:
        return f"{minutes} min {rest} s" if rest else f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if minutes else f"{hours} h"


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


def names(of: Sequence[str], most: int = 4) -> str:
    """Returns names in one clause: "a", "a and b", "a, b and 7 more"."""
    if len(of) > most:
        return f"{', '.join(of[:most])} and {len(of) - most} more"
    return " and ".join([", ".join(of[:-1]), of[-1]] if len(of) > 1 else of)


def lies_on(runs: Sequence[tuple[int, int]]) -> str:
    """Returns slots as text, of runs (first, last) of them: "slot 2", "slots 0-2, 4"."""
    told = [str(first) if first == last else f"{first}-{last}" for first, last in runs]
    return f"slot{'s' * (len(told) > 1 or '-' in told[0])} {', '.join(told)}"


def slots_named(slots: Sequence[int]) -> str:
    """Returns slots as text: "slot 2", "slots 0-2, 4"."""
    runs: list[tuple[int, int]] = []
    for slot in sorted(slots):
        if runs and runs[-1][1] == slot - 1:
            runs[-1] = runs[-1][0], slot
        else:
            runs.append((slot, slot))
    return lies_on(runs)


def trainers_named(ranks: Sequence[int]) -> str:
    """Returns trainers by rank as text: "trainer 1", "trainers 1, 3"."""
    return f"trainer{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def lacking(of_servers: Sequence[int], of_trainers: Sequence[int], join: str = "HOST:PORT") -> tuple[str, list[str]]:
    """Returns what a cluster still lacks to begin, and how to start each.

    Args:
        of_servers, of_trainers: those that are there, and those that it takes.
        join: the address of its coordinator.
    """
    (servers, slots), (trainers, of) = of_servers, of_trainers
    said = [f"{min(servers, slots)} of {slots} servers"]  # spares are not needed
    said.append(f"{trainers} of {of} trainers" if of else f"{trainers} trainers")
    hints = [f"a server is started by: torch-ecrec serve --join {join}"] if servers < slots else []
    if trainers < max(of, 1):
        hints.append(f"a trainer is a script that is started with TORCH_ECREC_JOIN={join}")
    return f"{' and '.join(said)} are there", hints


def format_gathering(of_servers: Sequence[int], of_trainers: Sequence[int], join: str | None = "HOST:PORT") -> str:
    """Returns what a cluster still lacks to begin, and how to start it, as the end of a sentence. See `lacking`.

    `join`: None: it is a script's own, which starts its servers and has all its trainers.
    """
    said, hints = lacking(of_servers, of_trainers, join or "")
    return f": {said}; {'; '.join(hints) if join is not None else 'this script has started it, and waits for the rest'}"


def format_filling(status: Status) -> str:
    """Returns how far slots are that get their records, from parity or a checkpoint, and how long it takes, or ""."""
    told = []
    for place in status.slots:
        if (one := place.filling) is not None and not place.healthy:
            left = f", {duration(one.left_s)} left" if one.left_s is not None else ""
            told.append(f"slot {place.slot} {one.share:.0%}{left}")
    how = "read from a checkpoint" if status.restored is not None and not status.step else "rebuilt"
    return f"{how}: {'; '.join(told)}" if told else ""


def format_slow(member: MemberStatus, slow: Late, join: str) -> tuple[str, str]:
    """Returns texts that name a server for which training waits, and what to do about it. `join`: of the cluster."""
    name = member.name
    remedy = f"to move its slots to a spare: torch-ecrec drain {name} --join {join}"
    if member.draining:
        remedy = "its slots are being moved away" if not member.spare else "it has no slot any more, and may be stopped"
    return (
        f"SLOW: training waits for {name} {slow.share:.0%} of the time: it answers {slow.late_s:.2f} s later than"
        f" most others, which take {slow.usual_s:.3f} s"
    ), remedy


def format_connections(said: Connections) -> str:
    """Returns the ways by which a member's data travels to and from others, with the number of each."""
    ways = [(said.memory, "in memory"), (said.tcp, "over TCP"), (said.rpc, "over torch RPC")]
    told = [f"{count} {text}" for count, text in ways if count]
    if said.bytes_packed:
        told.append(f"packed to {1 - said.bytes_saved / said.bytes_packed:.0%} where it pays")
    return ", ".join(told) or "-"


def format_partial(partial: PartialStatus) -> str:
    """Returns what partial recoveries have lost, as text."""
    slots = ", ".join(map(str, partial.last_slots))
    saves = f" and {partial.last_saves} saves on it" if partial.last_saves else ""
    return (
        f"NOT EXACT: {partial.lost_samples:.3%} of lost samples (CPR) by {partial.times} partial recoveries;"
        f" the last: slots {slots} took their records from checkpoint {partial.last}, of step"
        f" {partial.last_step}{saves}"
    )


def format_checkpoints(said: CheckpointsStatus) -> str:
    """Returns a text about a cluster's checkpoints: the last that counts, and one under way."""
    last = "none yet in this run"
    if said.last_age_s is not None:
        last = f"the last is of step {said.last_step}, {duration(said.last_age_s)} ago"
    return f"at {said.url}: {last}" + (f"; writing {said.running}" if said.running else "")


def format_tiers(slots: Sequence[SlotReport]) -> str:
    """Returns a text about the disks under servers; "" where there are none."""
    with_tier = [slot for slot in slots if slot.tier]
    if not with_tier:
        return ""

    def total(name: str) -> int:
        return sum(getattr(slot, f"tier_{name}") for slot in with_tier)

    hits, asked = total("hits"), total("hits") + total("misses")
    ways = ", ".join(sorted({slot.tier for slot in with_tier}))
    failed = f"; {total('failed_reads'):,} READS FAILED" if total("failed_reads") else ""
    share = f"{hits / asked:.1%} of records asked for were in memory" if asked else "nothing was asked for yet"
    return (
        f"{size(total('memory_bytes'))} in memory, {size(total('file_bytes'))} on disk: {share};"
        f" {total('reads'):,} reads by {ways}, {size(total('written_bytes'))} written{failed}"
    )


def format_saves(said: SavesStatus, slots: Sequence[SlotReport]) -> str:
    """Returns a text about the prioritised saves since the checkpoint, and the memory that their savers take."""
    last = f", the last of step {said.last_step}" if said.saves else ""
    memory = size(sum(slot.saver_bytes for slot in slots))
    longest_ms = 1e3 * max((slot.saver_pick_s for slot in slots), default=0.0)
    return (
        f"saves of {said.portion:.1%} of the rows ({said.saver}) since then: {said.saves}{last}; savers have"
        f" {memory}, and picked within {longest_ms:.1f} ms"
    )
