"""A coordinator's status as a text for people: whether all is well, and what there is."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch_ecrec.observe.verdict import JOIN, SILENT_S, Verdict, goes_on, rate_of, redundancy_of, verdict_of
from torch_ecrec.observe.words import (
    duration,
    format_checkpoints,
    format_connections,
    format_saves,
    format_tiers,
    lies_on,
    names,
    size,
    table,
    together,
    trainers_named,
)
from torch_ecrec.protocol.status import Connections, MemberStatus, Recent, SlotReport, SlotStatus, SpreadStatus, Status

TABLES_SHOWN = 12  # of more, a status says where they lie only if it is asked to
RECENT_SHOWN = 10


def format_status(status: Status, tables: bool = False, join: str = JOIN) -> str:
    """Returns a coordinator's status as text: whether all is well, what to do if it is not, and what there is.

    Args:
        tables: there are lines of tables even if there are more than `TABLES_SHOWN`.
        join: the cluster's address, for what is to be done.
    """
    verdict = verdict_of(status, join)
    reports = status.slot_reports()
    lines = [*_verdict(verdict), "", *_cluster(status, reports, verdict.notes)]
    lines += ["", *(_slots(status, reports) if status.slots else ["  no slots placed yet"])]
    if status.spread is not None:
        shown = tables or len(status.spread.tables) <= TABLES_SHOWN
        lines += (
            ["", *_tables(status.spread)]
            if shown
            else [f"  where the tables lie: torch-ecrec status --tables --join {join}"]
        )
    lines += ["", *_members(status)] if status.members else ["  no members"]
    if status.recent:
        lines += ["", "  lately", *(f"    {line}" for line in map(format_recent, status.recent[-RECENT_SHOWN:]))]
    return "\n".join(lines)


def _verdict(verdict: Verdict) -> list[str]:
    lines = []
    for finding in verdict.findings:
        lines += [f"{finding.level}: {finding.what}", f"  to do: {finding.remedy}"]
    return lines or [f"{verdict.level}: {verdict.says}"]


def _cluster(status: Status, reports: Mapping[int, SlotReport], notes: Sequence[str]) -> list[str]:
    code = status.code
    protection = f"(k, r) = ({code.k}, {code.r})" if code.protection == "parity" else "no protection"
    about = [
        (
            "cluster",
            f"{status.run}, {protection} on {code.slots} slots, {status.tables} tables, epoch {status.epoch},"
            f" roster {status.roster}, torch-ecrec {status.version}",
        ),
        ("training", _training(status)),
        ("protection", _protection(status)),
    ]
    if status.checkpoints is not None:
        about.append(("checkpoints", format_checkpoints(status.checkpoints)))
        if status.checkpoints.saves is not None:
            about.append(("", format_saves(status.checkpoints.saves, list(reports.values()))))
    if tiers := format_tiers(list(reports.values())):
        about.append(("tiers", tiers))
    if status.experiment is not None:
        lost, wrong = (sum(getattr(one, name) for one in reports.values()) for name in ("lost_steps", "wrong_stripes"))
        about.append(("experiment", f"so far {lost} acknowledged steps of slots are lost, {wrong} stripes were wrong"))
    about += [("note" if i == 0 else "", note) for i, note in enumerate(notes)]
    return [f"  {name:<11}  {text}" for name, text in about]


def _training(status: Status) -> str:
    said = [f"step {status.step}"]
    if status.rate is not None and goes_on(status):
        said.append(rate_of(status))
    if status.still_s is not None and status.step and not status.finished:
        said.append(f"the last step {duration(status.still_s)} ago")
    if status.wanted_trainers:
        said.append(f"{len(status.trainers)} of {status.wanted_trainers} trainers are there")
    return ", ".join(said)


def _protection(status: Status) -> str:
    safe = status.redundancy
    if safe is None:
        return redundancy_of(status)
    said = [redundancy_of(status)]
    if len(safe.hosts) > 1:
        may = [one.domain for one in safe.hosts if one.may_be_lost]
        not_ = [one.domain for one in safe.hosts if not one.may_be_lost]
        said.append(f"of hosts any of {names(may)}" if may else "no host")
        said += [f"not {names(not_)}"] if not_ else []
    if safe.spares:
        said.append(f"{safe.spares} spare server{'s' * (safe.spares > 1)} would take over")
    else:
        said.append("a survivor would take over" if safe.elsewhere else "no spare: its slots would wait for one")
    return ", ".join(said)


def _slots(status: Status, reports: Mapping[int, SlotReport]) -> list[str]:
    rows = [["slot", "server", "host", "incarnation", "state", "step", "watermark"]]
    rows[0] += ["records", "parity", "logs", "snapshots"]
    spread = status.spread
    rows[0] += [] if spread is None else ["records/mean", "load/mean"]
    servers = {one.name: one for one in status.members}
    for place in status.slots:
        own = reports.get(place.slot)
        if own is not None and own.incarnation != place.incarnation:
            own = None
        server = servers.get(place.server)
        cells = [str(place.slot), place.server or "(nobody)", (server and server.host) or "-", str(place.incarnation)]
        cells.append(_state(place, server, own))
        if own is None:
            cells += ["-"] * 6
        else:
            sizes = (own.record_bytes, own.parity_bytes, own.log_bytes, own.snapshot_bytes)
            cells += [str(own.step), str(own.watermark), *map(size, sizes)]
        cells += [] if spread is None else [f"{spread.records[place.slot]:.2f}", f"{spread.load[place.slot]:.2f}"]
        rows.append(cells)
    return table(rows)


def _state(place: SlotStatus, server: MemberStatus | None, own: SlotReport | None) -> str:
    if not place.server:
        return "waiting"
    if server is not None and not server.present:
        return "lost with its server"
    if server is not None and server.silent_s > SILENT_S:
        return f"silent for {duration(server.silent_s)}"
    if place.healthy:
        return "healthy"
    if own is None:
        return "starting"
    filling = place.filling
    said = f"rebuilding {own.rebuilt if filling is None else filling.share:.0%}"
    if filling is not None and filling.bytes_per_s is not None and filling.left_s is not None:
        said += f" at {size(filling.bytes_per_s)}/s, {duration(filling.left_s)} to go"
    return said


def _tables(spread: SpreadStatus) -> list[str]:
    rows = [["table", "rows", "dim", "lies on", "long bags"]]
    for one in spread.tables:
        bags = "pooled there" if one.pooled else "as rows"
        rows.append([one.name, str(one.rows), str(one.dim), lies_on(one.slots), bags])
    return table(rows)


def _members(status: Status) -> list[str]:
    rows = [["member", "role", "host", "address", "domain", "pid", "state", "silent", "memory", "connections"]]
    for member in status.members:
        state = "spare" if member.spare else "serving" if member.role == "server" else "training"
        if not status.slots:
            state = "waiting"
        elif member.report.awaits:
            state = f"waits for {trainers_named(member.report.awaits)}"
        state += ", draining" if member.draining else ""
        state += ", slow" if member.slow is not None else ""
        state = "left" if member.left else state if member.alive else "lost"
        if member.gone_s is not None:
            state += f" {duration(member.gone_s)} ago"
        silent = f"{member.silent_s:.1f} s" if member.present else "-"
        taken = member.report.process if member.present else None
        memory = "-" if taken is None else size(taken.resident_bytes)
        if taken is not None and taken.limit_bytes:
            memory += f" of {size(taken.limit_bytes)}"
        ways = format_connections((member.present and member.report.connections) or Connections())
        who = [member.name, member.role, member.host or "-", member.address or "-", member.domain or "-"]
        rows.append([*who, str(member.pid), state, silent, memory, ways])
    if all(row[4] in ("-", row[2]) for row in rows[1:]):  # a host that nobody named otherwise is its own domain
        rows = [row[:4] + row[5:] for row in rows]
    return table(rows)


def format_recent(recent: Recent) -> str:
    """Returns an event as a line: when it was, by the clock of who reads, and what."""
    at = time.strftime("%H:%M:%S", time.localtime(recent.time_s)) if recent.time_s else "--:--:--"
    return f"{at}  {told(recent.event)}"


def told(event: Mapping[str, Any]) -> str:
    """Returns an event (`events.json_of`) as a clause for people; "": another event tells it."""
    return telling(event).says


@dataclass(frozen=True)
class Telling:
    """An event as people are told it, in a log or on a page.

    Attributes:
        says: a clause, in a form with the event's fields in braces; "": another event tells it.
        tone: how good it is: OK, WARN, ERROR, or NONE, where it is neither.
        sign: a character that stands for it.
        marked: whether a picture of the throughput has a mark of it.
    """

    says: str
    tone: str = "NONE"
    sign: str = "·"
    marked: bool = False


def telling(event: Mapping[str, Any]) -> Telling:
    """Returns how an event is told. One of another version is told as it is."""
    more = {name: value for name, value in event.items() if name not in ("event", "time_s")}
    kind = str(event.get("event", ""))
    form = EMPTY.get(kind) if kind in EMPTY and not more.get(EMPTY_OF[kind]) else FORMS.get(kind)
    if form is not None:
        with contextlib.suppress(KeyError, ValueError, IndexError, AttributeError, TypeError):  # of another version
            return replace(form, says=form.says.format(**{name: _shown(value) for name, value in more.items()}))
    return Telling(", ".join([kind.replace("_", " "), *(f"{name} {value}" for name, value in more.items())]))


def _shown(value: Any) -> Any:
    """Returns a field of an event as it stands in a clause: of a list, what is in it."""
    if not isinstance(value, (list, tuple)):
        return value
    return ", ".join(together(one) if isinstance(one, (list, tuple)) else str(one) for one in value)


EMPTY_OF = {"lost": "slots", "cut": "fenced", "at_risk": "domains"}  # of which an empty list is told otherwise
EMPTY = {
    "lost": Telling("{member} was lost: {why}", "ERROR", "✕", True),
    "cut": Telling("members cannot reach each other: {pairs}; {why}", "ERROR", "✕", True),
    "at_risk": Telling("no failure domain is at risk any more", "OK", "●"),
}
FORMS = {
    "joined": Telling("{member} joined (pid {pid})", "NONE", "+"),
    "back": Telling("{member} is connected again, and has lost nothing", "OK", "+"),
    "turned_away": Telling("{member} of another cluster, {run}, was turned away: {why}", "WARN", "!"),
    "left": Telling("{member} left, as it was done", "NONE", "−"),
    "lost": Telling("{member} was lost: {why}; it hosted slots {slots}", "ERROR", "✕", True),
    "killed": Telling("{member} was told to end at once, from the live page", "WARN", "✕", True),
    "cut": Telling("members cannot reach each other: {pairs}; given up: {fenced} {why}", "ERROR", "✕", True),
    "stands_still": Telling("training stands, and waits for {members}: {why}", "WARN", "■", True),
    "goes_on": Telling("training goes on: all who were silent are back, or were given up", "OK", "▶", True),
    "slow": Telling("training waits for {member} {share:.0%} of the time", "WARN", "■"),
    "not_slow": Telling("training waits for {member} no more", "OK", "▶"),
    "roster": Telling(""),
    "regathering": Telling(
        "this coordinator was started in place of another, and asks members what they know", "WARN", "↻"
    ),
    "regathered": Telling("all go on with this coordinator: {members}", "OK", "▶", True),
    "placed": Telling("every slot has a server", "OK", "●"),
    "re-placed": Telling("slots have new hosts: epoch {epoch}", "NONE", "→"),
    "moved": Telling("a slot has moved: epoch {epoch}", "NONE", "→", True),
    "stayed": Telling("a slot stays where it is, as it could not move: epoch {epoch}", "NONE", "→"),
    "kept": Telling(""),
    "drained": Telling("{member} has no slot any more, and may be stopped", "OK", "●"),
    "draining": Telling("the slots of {member} move away: {why}", "WARN", "→"),
    "at_risk": Telling("failure domains that must not be lost: {domains}", "WARN", "!"),
    "ready": Telling(""),
    "re-hosted": Telling("slot {slot} is served again, and repaired meanwhile", "NONE", "▶"),
    "rebuilt": Telling(""),
    "slot rebuilt": Telling("slot {slot} has all its records again", "OK", "●", True),
    "damaged": Telling("slot {slot} has found damage: {what}", "ERROR", "✕", True),
    "mended": Telling("slot {slot} has mended damage", "OK", "●"),
    "era": Telling("trainers were lost: era {era} begins", "WARN", "↻", True),
    "going back": Telling("all go back to step {step}", "WARN", "↻"),
    "resumable": Telling("training can go on after step {step}", "OK", "▶", True),
    "checkpoint_begun": Telling("a checkpoint of step {step} is being written", "NONE", "▽"),
    "checkpointed": Telling("a checkpoint of step {step} was written, in {seconds:.1f} s", "OK", "▼", True),
    "saved": Telling("rows of step {step} were saved, in {seconds:.1f} s", "NONE", "▼"),
    "checkpoint_void": Telling("a checkpoint of step {step} failed: {reason}", "WARN", "✕", True),
    "went_beyond": Telling(
        "more was lost than parity repairs: all begin again at step {step}, from checkpoint {name}", "ERROR", "↻", True
    ),
    "began_anew": Telling("the cluster begins anew: nobody is left who knows what was trained", "ERROR", "↻"),
    "job_forgotten": Telling("another job has come: {difference}", "WARN", "↻"),
    "recovered_partly": Telling(
        "NOT EXACT: slots {slots} took their records of step {step} from checkpoint {name}", "ERROR", "✕", True
    ),
    "not_exact": Telling("NOT EXACT from step {step} on: {what}", "WARN", "!"),
    "fatal": Telling("the job has stopped: {reason}", "ERROR", "✕", True),
    "refused": Telling("{messages} messages were refused, the last from {from}: {why}", "WARN", "!"),
}
