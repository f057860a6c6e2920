"""The rules of one membership (`protocol/membership.py`): each transition, and events in every order that is drawn."""

from __future__ import annotations

import logging
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torch_ecrec.errors import ClusterUnavailable, DataLoss, Fenced, JoinRefused, TrainersLost
from torch_ecrec.protocol import membership, messages
from torch_ecrec.protocol.bounds import NO_SECRET
from torch_ecrec.protocol.membership import (
    Build,
    Close,
    Connect,
    End,
    Follow,
    Membership,
    Note,
    Pace,
    Say,
    SayLeave,
    Tell,
    Wait,
    join_of,
)
from torch_ecrec.spec.job import CodeSpec, JobSpec, TableSpec

GIVE_UP_S, STANDS_S, LEAST_S, MOST_S = 20.0, 100.0, 0.5, 2.0
PACE = Pace(GIVE_UP_S, STANDS_S, LEAST_S, MOST_S)
CODE = CodeSpec(3, 2, 1)
JOB = JobSpec((TableSpec("a", rows=4, dim=1, low=0.0, high=1.0),), CODE, 2)
KNOWN = messages.Known(job=JOB, placement=None, era=0, frozen=False, resume_step=0, done=0, load_end=None)
JOINS = {"server": join_of("server", "one", 1), "trainer": join_of("trainer", "one", 1, rank=1, job=JOB)}
OTHER = messages.OtherCluster("theirs", CodeSpec(6, 4, 2), "as ordered")
GONE = ClusterUnavailable("nobody listens")


def rules_of(role: str) -> Membership:
    return Membership(JOINS[role], "there:1", PACE, 0.0)


def welcome(role: str) -> messages.Welcome:
    return messages.Welcome(f"{role}-1", CODE, role == "trainer", 0, "sockets", "ours")


def hear(rules: Membership, word: Any) -> list[membership.Effect]:
    rules.heard(messages.json_of(word))
    return rules.take()


def joined(role: str = "server") -> Membership:
    """One that has joined at 0 s, and has nothing to do."""
    rules = rules_of(role)
    assert rules.step(0.0) == Connect(GIVE_UP_S)
    rules.connected(0.0)
    assert rules.take() == [Say(JOINS[role])]
    assert hear(rules, welcome(role)) == [Build(welcome(role))]
    rules.built("here")
    assert rules.take() == [Say(messages.Listens("here"))]
    assert rules.step(0.0) == membership.NOTHING and rules.is_joined and rules.is_connected
    return rules


def looking(role: str = "server") -> Membership:
    """One whose connection ended at 0 s, and who tries to connect for the first time."""
    rules = joined(role)
    rules.closed("eof")
    assert rules.step(0.0) == Connect(PACE.look_s)
    assert [type(effect) for effect in rules.take()] == [Note] and rules.looks
    return rules


def errors(effects: list[membership.Effect]) -> list[BaseException]:
    return [effect.error for effect in effects if isinstance(effect, End)]


# joining ----------------------------------------------------------------------------------------------


def test_a_process_joins_and_says_how_it_is_called() -> None:
    rules = joined("trainer")
    assert (rules.name, rules.run, rules.endpoint, rules.restarted) == ("trainer-1", "ours", "here", True)


def test_a_coordinator_that_ends_before_it_answers_is_replaced_with_longer_and_longer_pauses() -> None:
    rules, now_s, pauses = rules_of("server"), 0.0, []
    while not rules.is_over:
        step = rules.step(now_s)
        if isinstance(step, Connect):
            rules.connected(now_s)
            rules.closed("eof")
        elif not rules.is_over:
            pauses.append(step.until_s - now_s)
            now_s = step.until_s
    assert pauses[:4] == [0.5, 1.0, 2.0, 2.0] and now_s <= GIVE_UP_S
    assert isinstance(rules.failure, ClusterUnavailable) and "ended before it answered: eof" in str(rules.failure)
    effects = rules.take()
    assert effects.count(Close()) == len(pauses) and errors(effects) == [rules.failure]


def test_where_nobody_is_found_the_reason_is_given() -> None:
    rules = rules_of("server")
    rules.step(0.0)
    rules.missed(GIVE_UP_S, GONE)
    assert rules.failure is GONE
    rules = rules_of("server")
    rules.step(0.0)
    rules.connected(0.0)
    rules.closed("eof")
    assert rules.step(0.0) == Wait(LEAST_S) and rules.step(LEAST_S) == Connect(GIVE_UP_S - LEAST_S)
    rules.missed(GIVE_UP_S, GONE)
    assert str(rules.failure) == "the coordinator at there:1 ended (eof), and none came within 20 s"


def test_a_coordinator_that_does_not_answer_is_given_up_and_what_it_waits_for_is_told() -> None:
    rules = rules_of("server")
    rules.step(0.0)
    rules.connected(0.0)
    rules.take()
    (note,) = hear(rules, messages.Waits("a store hangs"))
    assert isinstance(note, Note) and "lets it in: a store hangs" in note.text
    assert rules.step(1.0) == Wait(GIVE_UP_S) and rules.step(GIVE_UP_S) == membership.NOTHING
    assert str(rules.failure) == "the coordinator at there:1 did not answer in 20 s: a store hangs"


@pytest.mark.parametrize(
    ("word", "kind", "text"),
    [
        (messages.Refused("refused", "as ordered"), JoinRefused, "refused by the cluster at there:1: as ordered"),
        (messages.Refused("data_loss", "as ordered"), DataLoss, "refused by the cluster at there:1: as ordered"),
        (messages.Refused(NO_SECRET, "has one"), JoinRefused, "the coordinator at there:1 has one"),
        (messages.Fatal("stopped", "as ordered"), ClusterUnavailable, "as ordered"),
        (messages.Loaded(3), ClusterUnavailable, "the coordinator sent what cannot be: Loaded: before a welcome"),
    ],
)
def test_a_refusal_is_final_also_if_the_connection_ends_right_after_it(
    word: Any, kind: type[Exception], text: str
) -> None:
    rules = rules_of("server")
    rules.step(0.0)
    rules.connected(0.0)
    rules.take()
    (error,) = errors(hear(rules, word))
    rules.closed("eof")
    assert type(error) is kind and str(error) == text and rules.failure is error
    assert rules.step(1.0) == membership.NOTHING and rules.take() == []


def test_whoever_does_not_know_the_secret_is_refused_where_it_joins() -> None:
    rules = rules_of("server")
    rules.step(0.0)
    rules.missed(0.0, GONE, stranger=True)
    assert isinstance(rules.failure, JoinRefused)


def test_a_connection_that_ends_before_it_is_said_to_be_there_is_no_connection() -> None:
    """The thread that reads it may be the faster one."""
    rules = rules_of("server")
    rules.step(0.0)
    rules.closed("eof")
    rules.connected(0.0)
    assert not rules.is_connected and rules.step(0.0) == Wait(LEAST_S)
    rules = looking()
    rules.closed("eof")
    rules.connected(1.0, known=KNOWN)
    assert not rules.is_connected and rules.step(1.0) == Wait(1.0 + LEAST_S)


def test_a_connection_that_ends_while_the_node_is_made_is_looked_for_by_the_member() -> None:
    rules = rules_of("server")
    rules.step(0.0)
    rules.connected(0.0)
    hear(rules, welcome("server"))
    rules.closed("eof")
    assert rules.step(1.0) == Wait(GIVE_UP_S)
    rules.built("here")
    assert rules.step(2.0) == Connect(PACE.look_s)
    rules.take()
    rules.connected(2.0, known=KNOWN)
    (said,) = rules.take()
    assert isinstance(said, Say) and isinstance(said.word, messages.Rejoin)


# looking ----------------------------------------------------------------------------------------------


def test_a_member_tells_the_next_coordinator_what_it_was_told() -> None:
    rules = joined("trainer")
    roster = messages.Roster(7, {"server-0": "there", "trainer-1": "here"}, {"server-0": ("10.0.0.1", 4)})
    restored: list[tuple[int, str]] = [(3, "a flip")]
    assert hear(rules, roster) == [Follow(roster)]
    assert hear(rules, messages.Roster(6, {"trainer-1": "here"})) == []
    assert hear(rules, messages.KnownInexact(restored)) == []
    assert hear(rules, messages.Job(JOB, "renamed")) == [Tell(messages.Job(JOB, "renamed"))]
    rules.closed("eof")
    rules.step(0.0)
    rules.take()
    rules.connected(1.0, led=5, known=KNOWN)
    (said,) = rules.take()
    assert isinstance(said, Say)
    told = messages.from_member(messages.json_of(said.word))
    assert isinstance(told, messages.Rejoin) and told == said.word
    assert (told.name, told.rank, told.session_id, told.led, told.run) == ("trainer-1", 1, "one", 5, "renamed")
    assert (told.roster, told.world, told.addresses) == (7, ["server-0", "trainer-1"], {"server-0": ("10.0.0.1", 4)})
    assert (told.endpoint, told.code, told.inexact, told.known) == ("here", CODE, restored, KNOWN)
    assert hear(rules, messages.Rejoined(4)) == [Tell(messages.Rejoined(4))]
    assert rules.term == 4 and not rules.looks and rules.step(9.0) == membership.NOTHING


def test_a_server_tells_the_next_coordinator_that_it_is_drained_until_that_is_undone() -> None:
    for words, told in (((True,), True), ((True, False), False)):
        rules = joined()
        for draining in words:
            assert hear(rules, messages.Drains(draining)) == []
        rules.closed("eof")
        rules.step(0.0)
        rules.take()
        rules.connected(1.0, known=KNOWN)
        (said,) = rules.take()
        assert isinstance(said, Say) and isinstance(said.word, messages.Rejoin) and said.word.draining == told
    (end,) = errors(hear(joined("trainer"), messages.Drains(True)))
    assert "drains: not to a server" in str(end)


def test_a_search_is_over_when_the_coordinator_has_said_so_and_no_earlier() -> None:
    """One that ends each connection is none: after so long the member gives up."""
    rules, now_s = looking(), 0.0
    while not rules.is_over:
        rules.connected(now_s, known=KNOWN)
        rules.closed("eof")
        step = rules.step(now_s)
        assert step == Wait(now_s + LEAST_S)
        now_s += LEAST_S
        rules.step(now_s)
    assert now_s == GIVE_UP_S
    (error,) = errors(rules.take())
    assert str(error) == "the coordinator is gone (eof), and none came within 20 s"


def test_where_nobody_listens_the_member_gives_up_in_time() -> None:
    rules, now_s = looking(), 0.0
    while not rules.is_over:
        now_s += PACE.look_s
        rules.missed(now_s, GONE)
        rules.step(now_s)
    assert now_s == GIVE_UP_S


@pytest.mark.parametrize("role", ["server", "trainer"])
def test_time_in_which_nothing_comes_back_does_not_count(role: str) -> None:
    """A trainer has patience meanwhile; after `stands_s` it counts as any other."""
    rules = looking(role)
    rules.missed(5.0, GONE, silent=True)
    told = [effect.word for effect in rules.take() if isinstance(effect, Tell)]
    nobody = ["the coordinator, of which nothing is heard"]
    assert told == ([messages.Stands(nobody, STANDS_S - 5.0)] if role == "trainer" else [])
    assert rules.step(5.0) == Connect(PACE.look_s)
    rules.missed(60.0, GONE, silent=True)
    assert rules.take() == [] and rules.step(60.0) == Connect(PACE.look_s)
    rules.missed(61.0, GONE)
    told = [effect.word for effect in rules.take() if isinstance(effect, Tell)]
    assert told == ([messages.Stands([], None)] if role == "trainer" else [])
    assert rules.step(79.0) == Connect(PACE.look_s), "for `give_up_s` since then"
    rules.missed(80.0, GONE)
    assert rules.is_over
    rules = looking(role)
    rules.missed(STANDS_S, GONE, silent=True)
    assert rules.is_over


@pytest.mark.parametrize("role", ["server", "trainer"])
def test_a_welcome_of_a_connection_that_was_given_up_is_none(role: str) -> None:
    """It was on its way as another coordinator was found to lead: nobody there knows this process any more."""
    rules = rules_of(role)
    rules.step(0.0)
    rules.connected(0.0)
    rules.closed("another one leads")
    rules.step(0.0)
    assert Close() in rules.take()
    rules.heard(messages.json_of(welcome(role)))
    assert not rules.name and not rules.take()
    assert isinstance(rules.step(LEAST_S), Connect)
    rules.connected(LEAST_S)
    rules.take()
    rules.heard(messages.json_of(welcome(role)))
    assert any(isinstance(effect, Build) for effect in rules.take())


def test_a_coordinator_of_another_cluster_is_told_once_and_looked_at_now_and_then() -> None:
    rules = looking()
    now_s = notes = 0
    while not rules.is_over:
        rules.connected(now_s, known=KNOWN)
        effects = hear(rules, OTHER)
        assert Close() in effects and not rules.is_connected
        notes += sum(isinstance(effect, Note) and effect.level == logging.ERROR for effect in effects)
        assert rules.step(now_s) == Wait(now_s + MOST_S)
        now_s += int(MOST_S)
        rules.step(now_s)
    assert notes == 1 and now_s == GIVE_UP_S
    (error,) = errors(rules.take())
    assert "is of another cluster: as ordered" in str(error)


def test_one_that_does_not_know_the_secret_may_be_followed_by_our_own() -> None:
    rules = looking()
    rules.missed(1.0, GONE, stranger=True)
    assert rules.step(1.0) == Wait(1.0 + MOST_S) and rules.step(1.0 + MOST_S) == Connect(PACE.look_s)
    rules.missed(3.0, GONE, stranger=True)
    assert [effect.text for effect in rules.take() if isinstance(effect, Note)] == [
        "server-1: nobody listens; keeps what it has, and looks for its own"
    ]
    assert not rules.is_over


def test_a_last_word_of_the_connection_before_ends_no_search() -> None:
    rules = looking()
    hear(rules, messages.Rejoined(1))
    rules.missed(GIVE_UP_S, GONE)
    assert rules.is_over


@pytest.mark.parametrize(
    ("word", "kind"),
    [
        (messages.Fatal("data_loss", "as ordered"), DataLoss),
        (messages.Fatal("trainers_lost", "as ordered"), TrainersLost),
        (messages.Fatal("fenced", "as ordered"), Fenced),
        (messages.Fatal("stopped", "as ordered"), ClusterUnavailable),
        (messages.Refused("other_build", "as ordered"), JoinRefused),
        (messages.Roster(1, {"server-0": "there"}), ClusterUnavailable),
        (welcome("server"), ClusterUnavailable),
    ],
)
def test_what_ends_a_membership(word: Any, kind: type[Exception]) -> None:
    rules = joined()
    (error,) = errors(hear(rules, word))
    assert type(error) is kind and rules.failure is None and rules.is_joined
    rules.end(GONE)
    assert rules.take() == [] and rules.step(1.0) == membership.NOTHING


def test_a_message_that_is_refused_ends_nothing() -> None:
    (note,) = hear(joined(), messages.Refused("refused", "as ordered"))
    assert isinstance(note, Note) and note.refused and "as ordered" in note.text


# leaving ----------------------------------------------------------------------------------------------


def test_a_server_says_that_it_leaves_and_goes() -> None:
    rules = joined()
    rules.leave()
    assert rules.take() == [SayLeave()] and rules.has_parted
    rules.part()
    assert rules.take() == [] and rules.is_over


def test_a_server_that_is_just_coming_back_says_it_then() -> None:
    rules = looking()
    assert rules.leave() == membership.CLOSE_S and not rules.has_parted and rules.take() == []
    rules.connected(0.5, known=KNOWN)
    said, leave = rules.take()
    assert isinstance(said, Say) and leave == SayLeave() and rules.has_parted


def test_a_trainer_stays_until_its_leave_was_heard_by_whichever_coordinator() -> None:
    rules = joined("trainer")
    assert rules.leave() == GIVE_UP_S and rules.take() == [SayLeave()] and not rules.has_parted
    rules.closed("eof")
    rules.step(0.0)
    rules.connected(1.0, known=KNOWN)
    rules.take()
    assert hear(rules, messages.Rejoined(1)) == [SayLeave(), Tell(messages.Rejoined(1))]
    hear(rules, messages.Left([0]))
    assert not rules.has_parted
    hear(rules, messages.Left([0, 1]))
    assert rules.has_parted


def test_a_trainer_that_nobody_hears_goes_in_the_end_and_is_told_of_no_end() -> None:
    rules = joined("trainer")
    rules.leave()
    rules.take()
    assert errors(hear(rules, messages.Fatal("stopped", "as ordered"))) == [] and rules.has_parted
    rules = joined("trainer")
    rules.leave()
    rules.take()
    rules.part()
    (note,) = rules.take()
    assert isinstance(note, Note) and "no coordinator has heard within 20 s that it is done" in note.text


def test_a_process_that_never_joined_has_nobody_to_tell() -> None:
    rules = rules_of("trainer")
    rules.leave()
    assert rules.has_parted and rules.take() == []


# events in any order ----------------------------------------------------------------------------------

WORDS = [
    messages.Waits("as ordered"),
    messages.Roster(2, {"server-1": "here", "trainer-1": "here"}),
    messages.Roster(3, {"server-1": "here", "trainer-1": "here"}),
    messages.KnownInexact([(1, "a flip")]),
    messages.Job(JOB, "ours"),
    messages.Loaded(1),
    messages.Rejoined(1),
    messages.Left([0, 1]),
    messages.Refused("refused", "as ordered"),
    messages.Fatal("fenced", "as ordered"),
    OTHER,
]
EVENTS = st.one_of(
    st.sampled_from(["time", "closed", "welcome", "built", "leave", "error"]),
    st.tuples(st.just("found"), st.sampled_from(["connected", "missed", "silent", "stranger"])),
    st.tuples(st.just("heard"), st.sampled_from(WORDS)),
)


@given(role=st.sampled_from(["server", "trainer"]), events=st.lists(EVENTS, max_size=40), pace_s=st.floats(0.0, 9.0))
def test_whatever_happens_in_whatever_order(role: str, events: list[Any], pace_s: float) -> None:
    """A join is said before a welcome and a rejoin after; it ends once, and then says nothing but that it leaves;
    rosters are followed in their order; a trainer's patience begins and ends in turn; nobody looks for ever.
    """
    rules, now_s, connecting, ended, patient, version = rules_of(role), 0.0, False, 0, False, 0
    to_build = asked = False

    def look() -> None:
        nonlocal connecting, ended, patient, version, to_build
        step = rules.step(now_s)
        if isinstance(step, Connect):
            assert not connecting and not rules.is_over and step.limit_s >= 0.0
            connecting = True
        else:
            assert step.until_s > now_s
        for effect in rules.take():
            if isinstance(effect, Say):
                assert not ended
                assert isinstance(effect.word, messages.Join) is not rules.is_joined
            elif isinstance(effect, Build):
                to_build = True
            elif isinstance(effect, Follow):
                assert effect.roster.version > version
                version = effect.roster.version
            elif isinstance(effect, Tell) and isinstance(effect.word, messages.Stands):
                assert role == "trainer" and bool(effect.word.names) is not patient
                patient = not patient
            elif isinstance(effect, End):
                ended += 1
                assert ended == 1 and rules.is_over

    look()
    for event in events:
        now_s += pace_s
        was_joined = rules.is_joined
        if event == "closed":
            rules.closed("eof")
        elif event == "welcome":
            if not rules.name and asked:  # perhaps on a connection that was given up meanwhile
                rules.heard(messages.json_of(welcome(role)))
        elif event == "built":
            if to_build:
                to_build = False
                rules.built("here")
        elif event == "leave":
            rules.leave()
        elif event == "error":
            rules.end(GONE)
        elif event != "time" and event[0] == "heard":
            rules.heard(messages.json_of(event[1]))
        elif event != "time" and connecting:
            connecting = False
            if event[1] == "connected":
                rules.connected(now_s, known=KNOWN)
                asked = True
            else:
                rules.missed(now_s, GONE, silent=event[1] == "silent", stranger=event[1] == "stranger")
        assert rules.is_joined or not was_joined
        look()
    limit_s = now_s + STANDS_S + 2 * GIVE_UP_S
    while (rules.looks or not rules.is_joined) and not rules.is_over and now_s < limit_s:
        if connecting:
            connecting = False
            rules.missed(now_s, GONE)
        now_s += LEAST_S
        look()
    assert rules.is_over or rules.is_connected, "it neither is with a coordinator nor looks for one"
    assert not rules.is_over or math.isinf(rules.step(now_s).until_s)  # type: ignore[union-attr]
