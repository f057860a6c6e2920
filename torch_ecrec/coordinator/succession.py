"""How a coordinator that was started again goes on from what members of the one before have told it."""

from __future__ import annotations

from collections.abc import Collection, Set

from torch_ecrec.coordinator import departures
from torch_ecrec.coordinator.admission import WENT_BACK
from torch_ecrec.coordinator.placement import data_loss
from torch_ecrec.coordinator.regathering import MemberReports
from torch_ecrec.coordinator.state import ClusterState
from torch_ecrec.observe import events
from torch_ecrec.protocol import messages
from torch_ecrec.protocol.messages import NO_HOST

ANOTHER_TRAINS = "trainers of another launch train here, and came back to a coordinator that had not known of them"
UNKNOWN_HOST = "nobody"  # in the event of a loss: the slot's host is not known any more


def on_beat(state: ClusterState, name: str, word: messages.Beat, now_s: float) -> None:
    """Notes a heartbeat, and whom its sender cannot reach: perhaps nobody else is to be waited for."""
    departures.on_beat(state, name, word, now_s)
    if state.regathering.active:
        state.regathering.on_beat(name, word.unreachable)
        go_on(state, now_s)


def go_on(state: ClusterState, now_s: float) -> None:
    """Ends the regathering as soon as everybody is back who is needed, or the time is up."""
    if not state.regathering.is_over(now_s, state.job.spec):
        return
    state.silence.look(now_s)
    if (awaited := _awaited(state, MemberReports(state.regathering.said))) and not state.silence.stand(awaited, now_s):
        return
    state.silence.end(now_s)
    dead = state.regathering.dead
    known = _newest(state, state.regathering.end())
    _send_rivals_away(state, known)
    state.learn(known)
    state.suspicion.follow(now_s)
    state.announce(events.Regathered(state.table.epoch, sorted(known.said)))
    for name in known.said:
        state.members.send(name, messages.Rejoined(state.members.term))
        state.job.tell_inexact(name)
    if known.placement is not None:
        _take_back(state, known, known.placement.epoch, dead, now_s)
    state.take_in(now_s, anew=state.roster.is_split)
    if known.placement is not None:
        # What waited for somebody to come, or for a slot that was rebuilt meanwhile: neither may come again.
        state.table.place_waiting()
        state.table.check_restored()
        state.table.moves.rebalance()


def _send_rivals_away(state: ClusterState, known: MemberReports) -> None:
    """Trainers of another launch were let in before anybody of the one that trains was back: they wait."""
    launches = {one.launch for one in known.said.values() if one.role == "trainer"}
    for one in state.members.trainers:
        if launches and one.name not in known.said and one.launch not in launches:
            state.members.send(one.name, messages.Fatal("trainers_lost", ANOTHER_TRAINS))
            del state.members.by_name[one.name]


def _dismiss(state: ClusterState, known: MemberReports, dead: Set[str], now_s: float) -> None:
    """Trainers that are missing are given up, and may live. Those who are back are told to end."""
    missing = sorted(known.world - known.said.keys() - known.hosts - dead)
    back = sorted(name for name, one in known.said.items() if one.role == "trainer")
    launches = {known.said[name].launch for name in back}
    if missing or back:
        named = f"a trainer that has not come back ({' or '.join(missing)})" if missing else back[0]
        state.launches.dismiss(launches.pop() if launches else None, named, now_s)


def _awaited(state: ClusterState, known: MemberReports) -> dict[str, str]:
    """Returns for whom training stands, and why: servers are missing that parity could not repair, together with those
    that were back and are silent again; or this process may be cut off itself. Nobody: it repairs them; or those of
    them that are known to be dead are too many already."""
    if state.silence.hears_nobody:
        return dict.fromkeys(sorted(state.silence.quiet), "not heard of since it was back")
    job = known.job or state.job.spec
    if known.placement is None or known.placement.restoring or job is None:
        return {}
    slots, lost = known.slots()
    unhealthy = {i for i, place in enumerate(slots) if not place.healthy and i not in lost}
    missing, dead = known.hosts - known.said.keys(), state.regathering.dead
    if not missing and not lost:
        return {}
    silent = known.hosts & state.silence.quiet

    def are_too_many(servers: Collection[str], more: Collection[int]) -> bool:
        gone = {i for i, place in enumerate(slots) if place.server in servers}.union(unhealthy, more)
        return data_loss(job, gone) is not None

    away = {address[0] for address in state.regathering.missing().values()}
    stands = are_too_many(missing | silent, lost) or state.silence.may_be_cut_off(job.trainers - len(known.done), away)
    # nobody has records of a life that was to read a checkpoint, whoever its host was
    nowhere = {slot for slot in lost if known.reads(slot, slots[slot].incarnation)}
    if not stands or are_too_many(missing & dead, nowhere):
        return {}
    again = dict.fromkeys(sorted(silent), "not heard of since it was back")
    why = "not back since the coordinator was started again"
    return {**dict.fromkeys(sorted(missing - dead) or ([] if again else [UNKNOWN_HOST]), why), **again}


def _newest(state: ClusterState, known: MemberReports) -> MemberReports:
    """Sends away members that had not heard that the cluster went back to a checkpoint without them; returns the
    reports of the others."""
    most = max((one.times for one in known.said.values()), default=0)
    for name, one in known.said.items():
        if one.times < most:
            kind = "trainers_lost" if one.role == "trainer" else "fenced"
            state.members.send(name, messages.Fatal(kind, WENT_BACK))
            del state.members.by_name[name]
    return MemberReports({name: one for name, one in known.said.items() if one.times == most})


def _take_back(state: ClusterState, known: MemberReports, epoch: int, dead: Set[str], now_s: float) -> None:
    """Goes on with the newest placement, without those who did not come back."""
    slots, lost = known.slots()
    state.table.take_back(epoch, slots, known.kept)
    job, said = state.job.spec, known.said
    strangers = any(trainer.name not in said for trainer in state.members.trainers)
    if known.unsettled or strangers or job is None or known.trainers < job.trainers:
        departures.lose_trainers(state, "trainers were lost while there was no coordinator", now_s)
        if job is not None:
            _dismiss(state, known, dead, now_s)
    gone = sorted({*state.table.hosted_by_others(said), *lost})
    if not gone:
        state.table.new_epoch(events.Kept)
        return
    for server in sorted({slots[i].server for i in gone}):
        hosted = [i for i in gone if slots[i].server == server]
        name = UNKNOWN_HOST if server == NO_HOST else server
        state.announce(events.Lost(name, "it did not rejoin", hosted))
    why = data_loss(job, state.table.unhealthy() | set(gone)) if job is not None and not state.job.restoring else None
    if why is not None and state.job.begins_as_told:
        state.job.go_back(why)  # as it would, were nobody left
    else:
        state.table.lose(gone)
