"""Is all well with a cluster, and what is there to be done? Worked out from its status alone; pure.

    OK      training goes on, or nothing is wanted, and what can be protected is
    WARN    training goes on, or waits as it may; somebody should look: less can be lost than before, or something fails
    ERROR   training does not go on, and will not by itself

A *finding* is one thing that is so, with what to do about it. The worst finding is the verdict. What is worth knowing,
and nothing to be done about, is a *note*.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from torch_ecrec.observe.words import (
    duration,
    format_partial,
    format_slow,
    lacking,
    names,
    size,
    slots_named,
    together,
    trainers_named,
    versions,
    versions_named,
)
from torch_ecrec.protocol.status import UNREADABLE, MemberStatus, Status
from torch_ecrec.protocol.status import json_of as status_as_json

Level = Literal["OK", "WARN", "ERROR"]
EXIT_CODES: dict[Level, int] = {"OK": 0, "WARN": 1, "ERROR": 2}

SCHEMA = 1  # of `json_of`
SILENT_S = 3.0  # a member that is not heard of for longer
STILL_S = 120.0  # without a step, though all are there
RESTART_S = 60.0  # for trainers that are started again
SERVER_S = 10.0  # for a server that is
PACE_LEAST_S, PACES = 5.0, 5.0  # without a step, and so many times what one takes: training does not go on
REFUSED_S = 300.0  # for so long somebody should look at who was refused
MEMORY_MOST = 0.92  # of what a process may take
JOIN = "HOST:PORT"


@dataclass(frozen=True)
class Finding:
    """Something that is so.

    Attributes:
        level: how bad it is.
        code: which one, a word for programs.
        what: for people, a clause or a sentence.
        remedy: what to do.
    """

    level: Level
    code: str
    what: str
    remedy: str


@dataclass(frozen=True)
class Verdict:
    """Whether all is well.

    Attributes:
        level: of the worst finding.
        says: all in one line, without the level.
        findings: the worst first. `notes`: what is worth knowing, besides.
    """

    level: Level
    says: str
    findings: list[Finding]
    notes: list[str]

    @property
    def exit_code(self) -> int:
        """Returns the exit code of `torch-ecrec status` for this verdict: 0, 1 or 2."""
        return EXIT_CODES[self.level]


def verdict_of(status: Status, join: str = JOIN) -> Verdict:
    """Returns whether all is well with the cluster that a status is of. `join`: its address, for remedies."""
    found = [*_ends(status), *_begins(status, join), *_training(status), *_members(status, join), *_slots(status, join)]
    found += [*_cuts(status), *_checkpoints(status), *_promises(status), *_memory(status, join), *_refusals(status)]
    found.sort(key=lambda finding: -EXIT_CODES[finding.level])
    level: Level = found[0].level if found else "OK"
    return Verdict(level, found[0].what if found else _all_well(status), found, _notes(status))


def _all_well(status: Status) -> str:
    if status.finished:
        return "the job has ended: all its trainers were done"
    rate = "" if status.rate is None else f", {rate_of(status)}"
    begun = f"training goes on at step {status.step}" if status.step else "all are there, and no step is done yet"
    if status.step and not goes_on(status):
        still = "" if status.still_s is None else f" for {duration(status.still_s)}"
        begun, rate = f"all are there at step {status.step}, and no step was done{still}", ""
    return f"{begun}{rate}; {redundancy_of(status)}"


def goes_on(status: Status) -> bool:
    """Returns whether steps come, at about the pace that they had."""
    if status.rate is None or status.still_s is None:
        return False
    return status.still_s < max(PACE_LEAST_S, PACES / status.rate.steps_per_s)


def rate_of(status: Status) -> str:
    """Returns how fast training goes, as text; "": it is not known."""
    if status.rate is None:
        return ""
    samples = status.rate.samples_per_s
    return f"{status.rate.steps_per_s:.3g} steps/s" + ("" if samples is None else f", {samples:,.0f} samples/s")


def redundancy_of(status: Status) -> str:
    """Returns what may be lost now, as text."""
    if status.code.protection != "parity":
        return "nothing is protected: any loss of a server ends it"
    if status.redundancy is None:
        return "nothing can be lost yet"
    losses = status.redundancy.losses
    serving = sum(1 for one in status.servers if not one.spare)
    if losses == 0:
        return "no server may be lost now"
    return f"any {losses} of {serving} servers may be lost"


# findings ---------------------------------------------------------------------------------------------


def _ends(status: Status) -> list[Finding]:
    if not status.fatal:
        return []
    remedy, kept = "end its processes, and start the cluster again", status.checkpoints
    if status.fatal.startswith(UNREADABLE):
        remedy += ", once that is mended; or with --restore URL@STEP, another one that is whole, as `torch-ecrec"
        remedy += " checkpoints URL --verify` says"
    elif kept is not None:
        # one that takes the place of another does not know what that has written
        last = f"the last checkpoint is of step {kept.last_step}" if kept.last else "step 0, where none is there"
        if not kept.last and (began := status.restored) is not None:
            last = f"if none is there yet, with that of step {began.step}, which this run began with"
        remedy += f" with --checkpoint {kept.url} --restore newest: {last}"
    elif status.restored is not None:
        remedy += f" with --restore URL@{status.restored.step}, the checkpoint that this run began with"
    else:
        remedy += ": no checkpoints are kept, so it begins at step 0, or with what the script itself has saved"
    return [Finding("ERROR", "stopped", f"STOPPED: {status.fatal}", remedy)]


def _begins(status: Status, join: str) -> list[Finding]:
    found = []
    if status.cannot_begin:
        what = f"has nothing to begin with, and refuses whoever joins: {status.cannot_begin}"
        remedy = "bring back the checkpoint that it names; or end the coordinator, and start one with another --restore"
        found.append(Finding("ERROR", "nothing_to_begin_with", what, remedy))
    elif status.looks:
        what = (
            "this coordinator has just begun: it waits for members of one before, and looks for a checkpoint to begin"
            " with; whoever joins waits"
        )
        if status.store_trouble:
            remedy = "mend the store, or the way to it: it is asked again every few seconds"
            found.append(Finding("ERROR", "store", f"{what}; not yet: {status.store_trouble}", remedy))
        else:
            found.append(Finding("WARN", "looks", what, "nothing, if it ends soon"))
    if (back := status.regathering) is not None:
        waits = f", and waits for {names(back.missing)}" if back.missing else ""
        what = f"the coordinator was started again: it has heard of {len(back.back)} members{waits}"
        remedy = "nothing, if it ends soon: training goes on meanwhile, and who does not come back is given up"
        found.append(Finding("WARN", "regathering", what, remedy))
    if status.gathering is not None and not status.fatal:
        said, hints = lacking(status.gathering.servers, status.gathering.trainers, join)
        what = f"the cluster has not begun: {said}"
        if status.restored is not None:
            what = f"all begin again after step {status.restored.step}, that of a checkpoint: {said}"
            hints.append("torchrun starts lost trainers again by itself, as `torch-ecrec up` does servers")
        found.append(Finding("WARN", "gathering", what, "; ".join(hints)))
    elif not status.slots and status.regathering is None and not (status.fatal or status.looks):
        if status.epoch == 0 and not status.finished and status.gathering is None:
            what, remedy = "the cluster has not begun: its slots are about to be placed", "nothing, if it ends soon"
            found.append(Finding("WARN", "begins", what, remedy))
    return found


def _training(status: Status) -> list[Finding]:
    if status.fatal or status.finished or not status.slots or status.regathering is not None:
        return []
    found = []
    stands = status.stands_still
    if stands is not None:
        limit = "until somebody is heard" if stands.left_s is None else f"for {stands.left_s:.0f} s at most"
        said = names([f"{name} ({why})" for name, why in sorted(stands.why.items())])
        what = f"STANDS STILL, waits for silent members, {limit}: {said}"
        where = names([_where(status, name) for name in sorted(stands.why)])
        remedy = (
            f"see whether their hosts run, and can be reached: {where}. When they are back, training goes on with every"
            f" bit. Whoever is ended for good is lost, and {status.code.r} at once can be repaired"
        )
        found.append(Finding("ERROR", "stands_still", what, remedy))
    there, wanted = len(status.trainers), status.wanted_trainers
    left = sum(1 for one in status.members if one.role == "trainer" and one.left)
    if stands is None and there + left < wanted:
        gone_back = "" if status.resume_step is None else f"; they go on after step {status.resume_step}"
        what = f"training stands: {there} of {wanted} trainers are there{gone_back}"
        late = status.absent_s is not None and status.absent_s > RESTART_S
        remedy = "torchrun starts lost trainers again; if it has ended, start all trainers again as before"
        found.append(Finding("ERROR" if late else "WARN", "trainers", what, remedy))
    elif status.going_back and stands is None:
        to = ", and find out to which step" if status.resume_step is None else f" to step {status.resume_step}"
        what = f"training stands: servers go back{to}"
        found.append(Finding("WARN", "goes_back", what, "nothing, if it ends soon"))
    elif stands is None and status.still_s is not None and status.still_s > STILL_S and not found:
        whom = sorted({rank for one in status.trainers for rank in one.report.awaits or ()})
        waits = f": {trainers_named(whom)} is waited for" if whom else ""
        what = f"no step was done for {duration(status.still_s)}, though all are there{waits}"
        remedy = "see what the scripts do: an evaluation may take so long, and so may a loader of data"
        found.append(Finding("WARN", "no_step", what, remedy))
    return found


def _members(status: Status, join: str) -> list[Finding]:
    if status.fatal or status.finished:
        return []
    silent = [one for one in status.members if one.present and one.silent_s > SILENT_S]
    found = []
    if silent and status.stands_still is None:
        longest = max(one.silent_s for one in silent)
        what = f"{names([one.name for one in silent])} {_were(silent)} not heard of for {duration(longest)}"
        where = names([_where(status, one.name) for one in silent])
        then = "is given up after its lease, and what it holds is repaired elsewhere"
        if all(one.role == "trainer" for one in silent):
            then = "is given up after its lease, and all trainers begin again at the step where they were"
        remedy = f"see whether its host runs, and can be reached ({where}); whoever does not come back {then}"
        found.append(Finding("WARN", "silent", what, remedy))
    for one in status.members:
        if one.slow is not None and one.alive and not one.draining:
            what, remedy = format_slow(one, one.slow, join)
            found.append(Finding("WARN", "slow", what, remedy))
    return found


def _slots(status: Status, join: str) -> list[Finding]:
    if status.fatal or status.finished or not status.slots:
        return []
    found = []
    serve = f"torch-ecrec serve --join {join}"
    homeless = [place.slot for place in status.slots if not place.server]
    if homeless:
        what = f"{slots_named(homeless)} {'have' if len(homeless) > 1 else 'has'} no server, and training waits for it"
        just = any(one.role == "server" and one.gone_s is not None and one.gone_s < SERVER_S for one in status.members)
        remedy = f"start one, best on another host: {serve}"
        if just:
            remedy = f"nothing, if whoever has started it starts another one now (`torch-ecrec up` does); else {serve}"
        found.append(Finding("WARN" if just else "ERROR", "no_server", what, remedy))
    filled = [place for place in status.slots if place.server and not place.healthy]
    if filled:
        shares = [place.filling for place in filled if place.filling is not None]
        left = [one.left_s for one in shares if one.left_s is not None]
        far = f", {min(one.share for one in shares):.0%} is there" if len(shares) == len(filled) else ""
        far += f", about {duration(max(left))} to go" if far and len(left) == len(filled) else ""
        said = (
            f"{slots_named([place.slot for place in filled])} {'are' if len(filled) > 1 else 'is'} being rebuilt{far}"
        )
        remedy = "nothing: training goes on meanwhile. End no server until it is done"
        if status.code.protection != "parity" or status.redundancy is None:
            said = said.replace("rebuilt", "read from a checkpoint")
            remedy = "nothing: training begins when it is done"
        elif status.stands_still is not None:
            remedy = "nothing: it is done once the silent members are back"
        what = f"{said}; {redundancy_of(status)}"
        found.append(Finding("WARN", "rebuilding", what, remedy))
    safe = status.redundancy
    if safe is not None and not filled and not homeless and safe.losses < safe.of:
        hosted = Counter(place.server for place in status.slots)
        several = [one.name for one in status.servers if hosted[one.name] > 1]
        if not several:
            return found  # it is who is silent that makes it less
        what = f"{redundancy_of(status)}, and {safe.of} with one slot a server: {names(several)} hosts several"
        found.append(Finding("WARN", "fewer_losses", what, f"start servers in place of those that were lost: {serve}"))
    if safe is not None and len(safe.hosts) > 1 and not filled and not homeless:
        risks = [risk for risk in status.at_risk if len(risk.slots) < len(status.slots)]
        if risks:
            first, more = risks[0], f"; {len(risks) - 1} more are at risk" if len(risks) > 1 else ""
            what = f"AT RISK: if {first.domain} is lost, {first.why}{more}"
            there = next((one.name for one in status.servers if one.domain.startswith(first.domain)), "SERVER")
            remedy = f"start servers on other hosts ({serve}), then: torch-ecrec drain {there} --join {join}"
            found.append(Finding("WARN", "at_risk", what, remedy))
    return found


def _cuts(status: Status) -> list[Finding]:
    if status.fatal or status.finished:
        return []
    found = []
    if status.unresolved.pairs:
        pairs = ", ".join(map(together, status.unresolved.pairs))
        hosts = sorted({_where(status, name) for pair in status.unresolved.pairs for name in pair})
        what = f"TRAINING CANNOT GO ON until they can reach each other: {pairs}; {status.unresolved.why}"
        lacks = "; who reaches nobody lacks threads or descriptors, as its log says"
        alone = any(who == whom for who, whom in status.unresolved.pairs)
        found.append(Finding("ERROR", "cut", what, f"mend the network between {', '.join(hosts)}{lacks * alone}"))
    known = {frozenset(pair) for pair in status.unresolved.pairs}
    for one in status.unreachable:
        if frozenset((one.who, one.whom)) in known:
            continue
        if one.who == one.whom:
            what = f"{one.who} LACKS threads or descriptors for its connections, for {duration(one.for_s)}"
            remedy = "its log says which; it is given up where training can do without"
        else:
            what = f"CUT: {one.who} cannot reach {one.whom}, for {duration(one.for_s)}"
            where = f"{_where(status, one.who)} and {_where(status, one.whom)}"
            remedy = f"mend the network between {where}; one of them is given up where training can do without"
        found.append(Finding("WARN", "cannot_reach", what, remedy))
    return found


def _checkpoints(status: Status) -> list[Finding]:
    said = status.checkpoints
    if said is None or status.fatal:
        return []
    found = []
    if said.failing_for_s is not None:
        what = f"checkpoints at {said.url} are FAILING for {duration(said.failing_for_s)}: {said.failing}"
        found.append(Finding("WARN", "checkpoints", what, "mend the store, or the way to it: it is tried again"))
    if said.saves is not None and said.saves.failing:
        what = f"the last save FAILED: {said.saves.failing}"
        found.append(Finding("WARN", "saves", what, "mend the store, or the way to it: it is tried again"))
    return found


def _promises(status: Status) -> list[Finding]:
    found, anew = [], "go back to a checkpoint of before, if that matters"
    if status.checkpoints is None and status.restored is None:
        anew = "train again from the beginning, if that matters: no checkpoints are kept (--checkpoint)"
    if status.partial is not None:
        what = format_partial(status.partial)
        found.append(Finding("WARN", "not_exact", what, anew))
    for one in status.inexact:
        what = f"NOT EXACT from step {one.step} on: {one.what}"
        found.append(Finding("WARN", "not_exact", what, anew))
    if status.experiment is not None:
        named = [status.experiment.mode] if status.experiment.mode else []
        named += [f"ranges={status.experiment.ranges}"] if status.experiment.ranges else []
        what = f"EXPERIMENT {', '.join(named)}: {'; '.join(status.experiment.gives_up)}"
        remedy = "unset TORCH_ECREC_EXPERIMENT_MODE and TORCH_ECREC_EXPERIMENT_RANGES, unless it is meant"
        found.append(Finding("WARN", "experiment", what, remedy))
    for slot, report in sorted(status.slot_reports().items()):
        if report.damaged > report.mended:
            host = _where(status, status.slots[slot].server)
            what = f"slot {slot} has {report.damaged - report.mended} damaged records or parities that are not mended"
            remedy = f"drain that server, and look at the memory of its host ({host})"
            found.append(Finding("WARN", "damaged", what, remedy))
    return found


def _memory(status: Status, join: str) -> list[Finding]:
    """Finds hosts whose memory is nearly full, each once: its processes share what is left."""
    found: dict[str, Finding] = {}
    for one in status.members:
        taken = one.report.process
        if not one.present or taken is None or not taken.limit_bytes:
            continue
        if taken.used_bytes > MEMORY_MOST * taken.limit_bytes:
            used = f"{size(taken.used_bytes)} of {size(taken.limit_bytes)}"
            what = f"memory of {taken.host} is nearly full: {used} are used, {size(taken.resident_bytes)} by {one.name}"
            away = f"torch-ecrec drain {one.name} --join {join}"
            remedy = "the kernel ends a process when it is full: give it more"
            remedy += f", or move slots away: {away}" if one.role == "server" else ""
            found.setdefault(taken.host, Finding("WARN", "memory", what, remedy))
    return [*found.values(), *_over(status)]


def _over(status: Status) -> list[Finding]:
    found = []
    for one in status.members:
        over = max((slot.tier_over_bytes for slot in one.report.slots or ()), default=0)
        if one.present and over:
            what = f"{_where(status, one.name)} takes {size(over)} more than its --memory: it has a lost slot"
            found.append(Finding("WARN", "over_memory", what, "start a server, which takes one of its slots"))
    return found


def _refusals(status: Status) -> list[Finding]:
    last = status.refusal
    if last is None or last.ago_s > REFUSED_S or status.fatal or status.finished:
        return []
    number = f"{status.refused_messages} messages were" if status.refused_messages > 1 else "a message was"
    what = f"{number} refused, the last {duration(last.ago_s)} ago, of {last.whose}: {last.why}"
    remedy = "mend or end who says so: it may be of another job, version or cluster; it is told why, too"
    return [Finding("WARN", "refused", what, remedy)]


# notes ------------------------------------------------------------------------------------------------


def _notes(status: Status) -> list[str]:
    found = []
    if status.move is not None:
        found.append(f"slot {status.move.slot} moves to {status.move.server}, and goes on where it is")
    for one in status.servers:
        if one.draining:
            slots = [place.slot for place in status.slots if place.server == one.name]
            state = "it has no slot any more, and may be stopped"
            if slots:
                state = f"{slots_named(slots)} {'are' if len(slots) > 1 else 'is'} still there"
            found.append(f"{one.name} is drained: {state}")
    if len(versions(status)) > 1:
        found.append(f"several versions are at work: {versions_named(status)}")
    safe = status.redundancy
    if safe is not None and len(safe.hosts) == 1 and status.code.protection == "parity":
        found.append(f"all servers are on one host, {safe.hosts[0].domain}: its loss is not survived")
    mended = {slot: report.mended for slot, report in status.slot_reports().items() if report.mended}
    if mended:
        count = sum(mended.values())
        found.append(f"damage was found, and mended from parity: {count} records of {slots_named(list(mended))}")
    if status.refused_messages and not _refusals(status):
        found.append(f"{status.refused_messages} messages were refused: the coordinator's log says whose, and why")
    for member in _lost(status)[-3:]:
        host = f" on {member.host}" if member.host else ""
        ago = "" if member.gone_s is None else f" {duration(member.gone_s)} ago"
        found.append(f"{member.name}{host} was lost{ago}: {member.why_gone or 'as a coordinator before has said'}")
    return found


def _lost(status: Status) -> Sequence[MemberStatus]:
    return [one for one in status.members if not one.alive and not one.left]


def _were(of: Sequence[object]) -> str:
    return "were" if len(of) > 1 else "was"


def _where(status: Status, name: str) -> str:
    """Returns a member's host and process, for who has to look at it."""
    found = [one for one in status.members if one.name == name]
    if not found:
        return name
    host = found[0].host
    return f"{name}, pid {found[0].pid}" + (f" on {host}" if host else "")


def json_of(status: Status, join: str = JOIN) -> dict[str, Any]:
    """Returns a status and its verdict as an object of JSON, as `torch-ecrec status --json` prints it.

    `schema` is a number that grows when a field goes or changes its meaning; fields may be added without.
    """
    verdict = verdict_of(status, join)
    said = {**asdict(verdict), "exit_code": verdict.exit_code}
    return {"schema": SCHEMA, "verdict": said, **status_as_json(status)}
