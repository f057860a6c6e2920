"""What a coordinator does not believe: who may not join or rejoin, and what a member cannot say. Changes nothing.

**Which cluster it is.** A cluster is told from others by its *run*, a word that its first coordinator makes, and by its
code. A coordinator knows its own once slots are placed, or while members of one before come back who know where they
are; or from its start, if its supervisor says so. Members of another cluster are turned away then: they keep what they
have, and go on looking for their coordinator. One that does not know yet becomes that of the first cluster whose
members find it, provided that code and job are what it was started with; until it has gone on from there, more
members of another one have it for theirs. If code or job are not that, and nobody else is there, it refuses to lead: a
running job looks for its coordinator here, and can have this place.
"""

from __future__ import annotations

from torch_ecrec.coordinator.members import MemberRecord
from torch_ecrec.coordinator.state import ClusterState
from torch_ecrec.protocol import messages
from torch_ecrec.protocol.build import bits_told, other_bits
from torch_ecrec.protocol.messages import Compare, Join, OfMember, OfSlot, Rejoin
from torch_ecrec.spec import experiment
from torch_ecrec.spec.job import CodeSpec

WENT_BACK = "more was lost than parity can repair, and the cluster went back to a checkpoint"
FENCED = "this process was taken for lost, and what it did has been given to another"


def join_refusal(state: ClusterState, join: Join) -> str | None:
    """Returns why a process may not join, or None."""
    for name in ("k", "r", "slots", "protection"):
        wanted, ours = getattr(join.code, name), getattr(state.job.code, name)
        if wanted is not None and wanted != ours:
            return f"code parameter {name} is {ours} in this cluster, got {wanted}"
    if why := experiment.difference(join.messages, state.job.experiment.variables()):
        return why
    if state.job.fatal is not None:
        return f"the cluster has stopped: {state.job.fatal}"
    if (other := build_refusal(state, join)) is not None:
        return other
    reason = state.job.refusal(join.job)
    return f"{reason}. {_remedy(state)}" if reason else state.launches.refusal(join, state.step)


def build_refusal(state: ClusterState, word: Join | Compare) -> str | None:
    """Returns why a process whose kernels give these bits may not be a member, or None.

    All that are present have been compared when they joined, so one of them stands for all. Who rejoins is not
    compared: it is of the cluster, and a newcomer who was let in before it was back is not to keep it out.
    """
    bits = bits_told(word.messages)
    there = next((one for one in state.members.present() if one.bits), None)
    return other_bits(word.version, bits, there.version, there.bits) or None if there is not None else None


def own_run(state: ClusterState) -> str | None:
    """Returns the run that this coordinator leads; None if it does not know yet, and may find members of one."""
    if state.job.known or state.table.placed:
        return state.job.run
    return state.regathering.run if state.regathering.active else None


def other_cluster(state: ClusterState, rejoin: Rejoin) -> str:
    """Returns why a member is of another cluster than this one, and keeps what it has; "": it is of this one, or has
    nothing.

    A trainer whose cluster is still to begin has nothing but its place in that.
    """
    job, own, placed = state.job, own_run(state), rejoin.known.placement is not None
    if not placed and rejoin.role == "server":
        return ""
    if rejoin.code != job.code:
        return f"code parameters are {_said(job.code)} here, and {_said(rejoin.code)} in its cluster"
    if why := experiment.difference(rejoin.messages, job.experiment.variables()):
        return why
    if placed and own is not None and rejoin.run != own:
        return f"this is cluster {own}, and it is a member of {rejoin.run}"
    return job.refusal(rejoin.known.job) or ""


def gives_way(state: ClusterState, rejoin: Rejoin, now_s: float) -> bool:
    """Returns whether those who are back are of a cluster of before, and this coordinator is to lead another, that of a
    member
    which it has turned away: it did not know which is its own, nothing has begun, and more are there of the other."""
    may = state.regathering.active and not state.job.known and rejoin.known.placement is not None
    if not may or rejoin.code != state.job.code or state.job.refusal(rejoin.known.job):
        return False
    return state.regathering.is_outnumbered(rejoin, now_s)


def refuses_to_lead(state: ClusterState, rejoin: Rejoin) -> bool:
    """Returns whether a coordinator that members of another cluster have found is to end, so that theirs can take its
    place."""
    knows = state.job.known and rejoin.run != state.job.run  # those who are its own are on their way
    return not knows and state.job.fatal is None and not state.members.present()


def _said(code: CodeSpec) -> str:
    return f"(k, r) = ({code.k}, {code.r}) on {code.slots} slots" + (
        "" if code.protection == "parity" else f" with {code.protection}"
    )


def forgets(state: ClusterState, join: Join) -> str | None:
    """Returns how the job of who joins differs from that of this cluster, if that one was given up before anything was
    made of it: nobody is there any more who wants it, and initial values have not been loaded. Else None."""
    begun = state.job.load_end is not None or state.regathering.active or state.job.fatal is not None
    if begun or state.members.present("trainer") or state.job.restored is not None:
        return None
    return state.job.refusal(join.job)


def _remedy(state: ClusterState) -> str:
    """Returns advice, as text, for somebody who wants to train another job than the cluster's."""
    here = [
        f"{one.name} (pid {one.pid} at {one.host or 'a host of its own'})" for one in state.members.present("trainer")
    ]
    if state.job.load_end is None and state.job.restored is None and here:
        return f"That one has not begun: end its trainers first, {', '.join(here)}"
    begins = "" if state.job.restored is None else " without `--restore`, or with that of a checkpoint of this job"
    return (
        f"To train this one, end that cluster (`torch-ecrec up`, or its coordinator) and start it anew{begins}, or name"
        " another in TORCH_ECREC_JOIN"
    )


def rejoin_refusal(state: ClusterState, rejoin: Rejoin) -> tuple[str, str] | None:
    """Returns why a member may not rejoin, with a kind for `fatal`, or None."""
    job = state.job
    if job.goes_back or (job.restored is not None and rejoin.times < job.restored.times):
        return "trainers_lost" if rejoin.role == "trainer" else "fenced", WENT_BACK
    if job.fatal is not None:
        return job.fatal_kind, f"the cluster has stopped: {job.fatal}"
    if rejoin.code != job.code:
        return "fenced", f"code parameters are {_said(job.code)} here, got {_said(rejoin.code)}: joins as a new server"
    if why := experiment.difference(rejoin.messages, job.experiment.variables()):
        return "fenced", why
    if (reason := job.refusal(rejoin.known.job)) is not None:
        return "stopped", reason
    member = state.members.by_name.get(rejoin.name)
    unknown = member is None or (member.alive and member.session_id != rejoin.session_id)
    if state.regathering.active or (unknown and not state.table.placed):
        return ("fenced", FENCED) if state.regathering.knows_better(rejoin) else None
    if member is None or not member.present or member.session_id != rejoin.session_id:
        return "fenced", FENCED
    epoch = rejoin.known.placement.epoch if rejoin.known.placement is not None else 0
    if rejoin.roster > state.roster.version or rejoin.known.era > state.eras.number or epoch > state.table.epoch:
        return "fenced", f"{rejoin.name} knows a roster, an era or a placement that there has not been"
    return None


def objection(state: ClusterState, member: MemberRecord, word: OfMember) -> str | None:
    """Returns why a member cannot say this, whenever it was sent; None: it may."""
    if isinstance(word, (messages.Loaded, messages.NotExact, messages.Progress)) and member.role != "trainer":
        return f"{member.name} is no trainer"
    if isinstance(word, messages.Loaded) and state.job.restored is not None:
        return "the cluster has begun with a checkpoint: nobody loads initial values"
    if isinstance(word, messages.Progress) and word.trainer != member.rank:
        return f"`trainer` must be {member.rank}, got {word.trainer}"
    if isinstance(word, OfSlot):
        if member.role != "server":
            return f"{member.name} is no server"
        if word.slot >= len(state.table.slots):
            return f"`slot` must be below {len(state.table.slots)}, got {word.slot}"
    if isinstance(word, messages.Reach) and state.job.spec is not None:
        trainers = {trainer for _, _, kept in word.snapshots for trainer in kept}
        if trainers and max(trainers) >= state.job.spec.trainers:
            return f"`snapshots`: trainers must be below {state.job.spec.trainers}, got {max(trainers)}"
    return None
