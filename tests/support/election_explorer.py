"""Random schedules for the election of coordinators (`coordinator/election.py`), and what must hold at every moment.

    found = run(schedule(7, "forget1")).finds

    PYTHONPATH=tests/support python -m election_explorer --profile mix --seeds 0:2000 --shrink 2

The real `Candidate` runs in *processes* (fibers: greenlet) on a virtual clock, against an etcd that behaves as the real
one does in what matters here: revisions that also leases' ends increase, lease ids that are never used twice, leases
that begin anew when etcd is started again, a transaction that compares first. A call has three moments: it is sent, it
takes effect, its answer is read. A process that is stopped (SIGSTOP) stands still at whichever comes next; what it has
sent takes effect all the same. Members look who leads as `transport/whereabouts.py:Elected` does, and keep or leave
connections as `is_followed` says.

A schedule is a list of events `(at_s, kind, *what)`; all else follows from the seed of the jitter, so that a schedule
can be shrunk by leaving events out. Kinds:

    fault p kind s    the next call of process p: refused, unanswered, late (by s), slow (half of s before its effect),
                      twice (done twice, the second answer is read), echo (done again after s)
    cut p s           no call of p arrives for s
    outage s          etcd answers nobody for s; its leases begin anew then
    forget s          likewise, and it is empty then
    restore s back    likewise, and it is as it was `back` seconds before
    stop p s          SIGSTOP for s
    before p call s   SIGSTOP for s, just before it sends its next call of that name
    pace p s          every call of p takes s from now on, half of it before its effect
    begins p s        what a run begins with takes p so long to find
    kill p / term p   it ends; it is told to end
    start             one more process, that knows nothing
    end               whoever acts is told that the run is over (members hear that at once)
    skew p s          its clock is s further (before it starts)

What is checked:

    two        two processes that are not stopped both `hold`
    second     a run begins while one goes on, and a live process knows of that one
    second-asleep  likewise, and all who know of it are stopped or cut off at that moment
    second-over    likewise, by one that has found etcd put back to the end of a run before
    begun-twice    a run begins that somebody has led
    untrue     a process ends as if its run were over, and it is not
    led-on     an ended run is led after its end has been written to etcd (`led-on-untold`: before that could be said)
    led-on-ever    likewise, long after all faults
    revision   somebody leads whose revision is not larger than any that members have seen of another leader
    nobody     long after all faults, nobody leads though a process lives (`many`: several hold)
    lost       long after all faults, a member is not with who leads
"""

from __future__ import annotations

import argparse
import json
import random
from collections import Counter
from typing import Any

from election_world import World

from torch_ecrec.coordinator import election

PROFILES = {
    # kinds with weights; forget/restore at most so many
    "plain": dict(forget=0, restore=0, end=0),
    "forget1": dict(forget=1, restore=0, end=0),
    "forget1e": dict(forget=1, restore=0, end=1),
    "forget2": dict(forget=2, restore=0, end=0),
    "restore1": dict(forget=0, restore=1, end=0),
    "mix": dict(forget=2, restore=2, end=2),
    "ends": dict(forget=0, restore=0, end=3),
    # nothing stops for ever or for long; calls, etcd, deaths only
    "forget1calm": dict(forget=1, restore=0, end=0, calm=True),
    "forget2calm": dict(forget=3, restore=0, end=0, calm=True),
    "restore1calm": dict(forget=0, restore=1, end=0, calm=True),
    "endscalm": dict(forget=0, restore=0, end=3, calm=True),
}


def schedule(seed: int, profile: str) -> dict[str, Any]:
    r = random.Random(f"{seed} {profile}")
    about = PROFILES[profile]
    calm = about.get("calm", False)
    ttl = r.choice((2, 2, 2, 3, 5, 10))
    procs = r.choice((1, 2, 2, 3, 3, 4))
    length = r.uniform(4, 14) * ttl / 2
    empty = r.random() < 0.3
    begin = 1.0 + (election.UNKNOWN_LEASES * ttl if empty else 0.0)
    events: list[tuple[Any, ...]] = []
    for p in range(procs + 3):
        if r.random() < 0.3:
            events.append((0.0, "skew", p, r.choice((-1000.0, 0.7, 1e6))))

    def when() -> float:
        return round(r.uniform(begin if r.random() < 0.8 else 0.0, begin + length), 3)

    if r.random() < 0.15:
        slow = r.choice((0.4 * ttl, 1.5 * ttl))  # is the store where they look for what a run begins with
        events += [(0.0, "begins", p, slow) for p in range(procs + 3)]
    hot = [when() for _ in range(2)]  # things happen close to each other

    def near() -> float:
        if r.random() >= 0.7:
            return when()
        return max(0.0, round(r.choice(hot) + r.uniform(-0.7, 1.7) * r.choice((0.2, 1.0, ttl / 2)), 3))

    def who() -> str | int:
        return "L" if r.random() < 0.4 else r.randrange(procs + 2)

    spans = [0.0, 0.1, 0.3, 0.6, 0.8 * ttl, 0.95 * ttl, 1.1 * ttl, 1.6 * ttl, 2.2 * ttl, 3 * ttl]
    short = [0.1, 0.2, 0.4, 0.7] if calm else spans
    for _ in range(r.randrange(0, 7)):
        kind = r.choice(("refused", "unanswered", "late", "slow", "twice", "echo"))
        events.append((near(), "fault", who(), kind, r.choice(short)))
    for _ in range(r.randrange(0, 3)):
        events.append((near(), "cut", who(), r.choice(short)))
    for _ in range(r.randrange(0, 2)):
        events.append((near(), "outage", r.choice(spans)))
    for _ in range(about["forget"]):
        events.append((near(), "forget", r.choice(spans)))
    for _ in range(about["restore"]):
        events.append((near(), "restore", r.choice(spans), round(r.uniform(0, length + begin), 2)))
    if not calm:
        for _ in range(r.randrange(0, 4)):
            events.append(
                (near(), "stop", who(), r.choice(spans + [1e9]) if r.random() < 0.8 else r.uniform(0, 4 * ttl))
            )
        if r.random() < 0.1:
            events.append((near(), "begins", who(), r.choice(spans)))
        for _ in range(r.randrange(0, 2)):
            events.append(
                (near(), "before", who(), r.choice(("look", "write", "grant", "take", "renew", "end")), r.choice(spans))
            )
    for _ in range(r.randrange(0, 3)):
        events.append((near(), r.choice(("kill", "kill", "term")), who()))
    for _ in range(r.randrange(0, 4)):
        events.append((near(), "start"))
    for _ in range(about["end"]):
        if r.random() < 0.7:
            events.append((near(), "end"))
            if r.random() < 0.5:
                events.append((near(), "start"))
    return dict(seed=seed, ttl=ttl, procs=procs, empty=empty, events=sorted(events, key=lambda e: e[0]))


def run(s: dict[str, Any], verbose: bool = False) -> World:
    events, ignored = [tuple(e) for e in s["events"]], frozenset(s.get("ignored", ()))
    world = World(s["seed"], s["ttl"], s["procs"], events, s["empty"], verbose, ignored)
    world.stop_at = s.get("until", world.stop_at)
    return world.go()


def kind_of(s: dict[str, Any]) -> str:
    finds = run(s).finds
    return finds[0].kind if finds else ""


def shrink(s: dict[str, Any], kind: str) -> dict[str, Any]:
    changed = True
    while changed:
        changed = False
        for i in range(len(s["events"])):
            less = {**s, "events": s["events"][:i] + s["events"][i + 1 :]}
            if kind_of(less) == kind:
                s, changed = less, True
                break
        if not changed and s["procs"] > 1:
            less = {**s, "procs": s["procs"] - 1}
            if kind_of(less) == kind:
                s, changed = less, True
    return s


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--profile", default="plain", choices=PROFILES)
    parser.add_argument("--seeds", default="0:500")
    parser.add_argument("--shrink", type=int, default=0, help="so many of each kind")
    parser.add_argument("--show", default="", help="a schedule as JSON, told in full")
    parser.add_argument("--kinds", default="", help="only these are shrunk")
    args = parser.parse_args()
    if args.show:
        for found in run(json.loads(args.show), verbose=True).finds:
            print(found)
        return
    first, last = map(int, args.seeds.split(":"))
    became: Counter[str] = Counter()
    shrunk: Counter[str] = Counter()
    for seed in range(first, last):
        s = schedule(seed, args.profile)
        try:
            found = run(s).finds
        except Exception as error:
            print("ERROR", seed, repr(error), json.dumps(s))
            raise
        kind = found[0].kind if found else "good"
        became[kind] += 1
        if kind != "good" and shrunk[kind] < args.shrink and (not args.kinds or kind in args.kinds.split(",")):
            shrunk[kind] += 1
            less = shrink(s, kind)
            print(run(less).finds[0], json.dumps(less), flush=True)
    print(args.profile, dict(became))


if __name__ == "__main__":
    main()
