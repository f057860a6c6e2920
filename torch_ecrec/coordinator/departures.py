"""What follows when a member is lost or done."""

from __future__ import annotations

from torch_ecrec.coordinator.admission import FENCED
from torch_ecrec.coordinator.state import ClusterState
from torch_ecrec.coordinator.suspicion import Pair, smallest_cover
from torch_ecrec.observe import events
from torch_ecrec.protocol import messages


def lose(state: ClusterState, name: str, now_s: float, why: str) -> None:
    """Handles the loss of a member: slots of a server get other hosts; without one trainer none can go on."""
    members, table = state.members, state.table
    member = members.by_name.get(name)
    if member is None or not member.alive:
        return
    member.alive = False
    if member.left:
        return
    member.gone_s, member.why_gone = now_s, why
    if state.regathering.forget(name):
        del members.by_name[name]
        return
    if state.job.fatal is not None:
        return
    slots = table.hosted_by(name)
    state.announce(events.Lost(name, why, slots))
    if member.role == "trainer":
        if table.placed:
            lose_trainers(state, f"{name} was lost ({why})", now_s)
        else:
            del members.by_name[name]
            state.drop(name)  # there may be a roster: of a coordinator that ended before anybody heard where slots are
        return
    state.drop(name)
    if slots:
        table.lose(slots)
    else:
        table.moves.on_gone(name)


def lose_trainers(state: ClusterState, why: str, now_s: float) -> None:
    """Begins a new era after the loss of a trainer. None can go on without it, so those that live are told to end."""
    members = state.members
    gone = [member.name for member in members.trainers]
    for member in members.trainers:
        if member.present:
            members.send(member.name, messages.Fatal("trainers_lost", why))
        del members.by_name[member.name]
    if members.done:
        members.done.clear()
        members.tell(messages.Left([]), "server")
    if state.table.placed and not state.job.restoring:  # until all is restored, trainers have asked for nothing
        state.eras.begin(keeps=False)
    state.drop(*gone)


def lose_absent(state: ClusterState) -> None:
    """Gives up servers that left quietly after the end of training, as training goes on after all."""
    slots = state.table.hosted_by_others({member.name for member in state.members.present("server")})
    if slots and state.job.fatal is None:
        state.table.lose(slots)


def on_beat(state: ClusterState, name: str, word: messages.Beat, now_s: float) -> None:
    """Notes a heartbeat, and whom its sender cannot reach; acts on such a complaint at once, or at the next tick.

    If this process has stood still, others may have said something that is not read yet.
    """
    state.suspicion.on_beat(name, word.unreachable, state.members.by_name, now_s)
    if word.unreachable and state.members.is_awake(now_s):
        act_on_complaints(state, now_s)


def act_on_complaints(state: ClusterState, now_s: float) -> None:
    """Members that cannot be reached are lost early; of two that cannot reach each other one is fenced."""
    suspicion, known, table = state.suspicion, state.members.by_name, state.table
    forgiven = suspicion.forget_gone(known, now_s)
    if state.regathering.active or state.job.fatal is not None:
        return
    act_on_silence(state, now_s)
    suspicion.forget_gone(known, now_s)
    needed, all_cuts = set(table.needed()), suspicion.cuts(known, now_s)
    _end_move(state, all_cuts)
    cuts = [pair for pair in all_cuts if needed.issuperset(pair)]
    among_servers, cover = _cover(state, cuts, now_s)
    if cover and suspicion.may_fence(now_s):
        suspicion.fenced(now_s)
        state.announce(events.Cut(among_servers, sorted(cover), ""))
        for name in sorted(cover):
            others = sorted({other for pair in among_servers if name in pair for other in pair} - {name})
            lacks = "it has no threads or descriptors for connections, as its log says"
            fence(state, name, now_s, f"it and {', '.join(others)} cannot reach each other" if others else lacks)
    elif among_servers and not cover:
        if leaving := table.leaving({name for pair in among_servers for name in pair}):
            slots = ", ".join(map(str, leaving))
            state.announce(events.Cut(among_servers, [], f"slots that lack records get another host: {slots}"))
            table.leave(leaving)
    why = "" if cover or not among_servers else "more slots would be lost than can be repaired or find a host"
    left = [pair for pair in cuts if pair not in among_servers or not cover]
    _say_unresolved(state, left, why or "trainers cannot reach each other")
    if forgiven:
        table.moves.rebalance()


def act_on_silence(state: ClusterState, now_s: float) -> None:
    """Gives up members that are only silent, if the code can repair them together with all who are silent now.
    Otherwise training stands until they are back, or the time is up."""
    silence, table, was_quiet = state.silence, state.table, state.silence.quiet
    over = silence.look(now_s)
    if over and _must_stand(state):
        if not silence.stand(over, now_s):
            for name in over:
                table.moves.on_gone(name)
            return
    for name in sorted(over):
        fence(state, name, now_s, over[name])
    silence.end(now_s)
    if was_quiet - silence.quiet:
        table.place_waiting()  # nobody was heard who could host it
        table.moves.rebalance()  # nor where a slot could move to


def _must_stand(state: ClusterState) -> bool:
    """Returns whether nobody may be given up now who is only silent."""
    silence, table, job = state.silence, state.table, state.job.spec
    if not table.placed or job is None:
        return silence.hears_nobody
    return not table.repairs(silence.quiet) or silence.may_be_cut_off(job.trainers - len(state.members.done))


def _cover(state: ClusterState, cuts: list[Pair], now_s: float) -> tuple[list[Pair], set[str]]:
    """Returns the pairs of members between which a cut can be resolved, and the servers to fence for it.

    What is complained of but not for long yet counts, too, once something is decided: of one that nobody can reach some
    complain before others.
    """
    table, known = state.table, state.members.by_name
    needed = set(table.needed())
    recent = [pair for pair in state.suspicion.cuts(known, now_s, 0.0) if needed.issuperset(pair)] if cuts else []
    for pairs in (recent, cuts):
        among_servers = [pair for pair in pairs if any(map(table.hosted_by, pair))]
        cover = smallest_cover(among_servers, lambda name: len(table.hosted_by(name)), table.may_lose)
        if cover:
            break
    return among_servers, cover


def _end_move(state: ClusterState, cuts: list[Pair]) -> None:
    """Cancels the move of a slot to a server that somebody cannot reach, so that the slot goes on at its old host."""
    move = state.table.moves.current
    if move is not None and any(move.server in pair for pair in cuts):
        state.table.moves.stay()


def _say_unresolved(state: ClusterState, pairs: list[Pair], why: str) -> None:
    if pairs and state.suspicion.unresolved != (pairs, why):
        state.announce(events.Cut(pairs, [], why))
    state.suspicion.unresolved = (pairs, why if pairs else "")


def fence(state: ClusterState, name: str, now_s: float, why: str) -> None:
    """Gives up a member, and tells it so, in case it hears it."""
    state.members.send(name, messages.Fatal("fenced", FENCED))
    if (member := state.members.by_name.get(name)) is not None and member.role == "trainer":
        state.launches.dismiss_silent(member, now_s)
    lose(state, name, now_s, why)


def leave(state: ClusterState, name: str, now_s: float) -> None:
    """Handles the farewell of a trainer that is done, or of a server that ends.

    What a server hosted is lost as if it had been killed, unless training is over: whether trainers are there, go
    back, or are to be started again, the job may go on and needs it. Trainer 0 is not done before it has loaded the
    initial values: others wait for them, for as long as it is there. A trainer says it until it is told that it was
    heard; the others, servers too, are told, since the next coordinator has that from them.
    """
    members, table = state.members, state.table
    member = members.by_name[name]
    if member.role == "server":
        if state.regathering.active or (not _is_over(state) and table.hosted_by(name)):
            lose(state, name, now_s, "it left")
            return
    first, member.left = not member.left, True
    if member.role == "trainer":
        members.done.add(member.rank)
        _tell_left(state)
    if not first:
        return
    member.gone_s = now_s
    if member.rank == 0 and table.placed and state.job.load_end is None and not state.job.restoring:
        reason = f"{name} left before it had loaded the initial values"
        members.tell(messages.Fatal("trainers_lost", reason), "trainer")
    state.announce(events.MemberLeft(name))
    state.drop(name)
    table.moves.on_gone(name)


def _tell_left(state: ClusterState) -> None:
    members = state.members
    for member in members.by_name.values():
        if member.alive and (member.role == "trainer" or not member.left):
            members.send(member.name, messages.Left(sorted(members.done)))


def _is_over(state: ClusterState) -> bool:
    """Returns whether all trainers have said that they are done."""
    trainers = state.members.trainers
    return bool(trainers) and all(member.left for member in trainers) and state.eras.going_back is None
