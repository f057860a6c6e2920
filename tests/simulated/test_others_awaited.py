"""Who waits for another trainer says so, and does not give up a cluster that answers: it may evaluate for hours."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from coordinator_harness import Harness
from harness import Scenario, SimulatedCluster, simulate
from harness.membership import VirtualProcess
from models import CPU, Net, batch_of, collection, job_of
from virtual_trainers import Trainers, TurnsSession

from torch_ecrec import DistributedModelParallel, checkpoint
from torch_ecrec.client.client import LOOK_MOST_S
from torch_ecrec.observe.text import format_status
from torch_ecrec.protocol import messages

LONG_S = 20.0
SCENARIO = Scenario(steps=6)


class Elsewhere(SimulatedCluster):
    """Some trainers' scripts do other things for a while, as told by `elsewhere`; others look out for them."""

    def __init__(self, scenario: Scenario) -> None:
        super().__init__(scenario)
        self.elsewhere: set[int] = set()
        self.patient_s: dict[int, list[float]] = {}  # trainer -> when it knew for whom it waits

    def on_welcome(self, process: VirtualProcess) -> None:
        super().on_welcome(process)
        if process.role == "trainer":
            client, known_s = self.clients[process.name], self.patient_s.setdefault(process.rank, [])
            client.on_awaited = lambda: known_s.append(self.network.clock.now_s)
            client.run(client.look_out)

    def _run_trainers(self) -> bool:
        self.scripts.go_on(lambda rank: self.ranks[rank].dead or rank in self.elsewhere)
        return not self.ending and self.scripts.done

    def until_step(self, done: int) -> None:
        while min((client.done for client in self.clients.values()), default=0) < done or len(self.clients) < 2:
            self._run_trainers()
            assert self.network.clock.advance()

    def pass_time(self, seconds: float) -> float:
        """So many pass; returns when they began."""
        begun_s = self.network.clock.now_s
        while self.network.clock.now_s < begun_s + seconds:
            self._run_trainers()
            assert self.network.clock.advance()
        return begun_s

    def hang(self, slot: int) -> None:
        """The host of a slot answers nobody any more."""
        self.network.handlers[self.slots_known[slot].server] = lambda request, reply: None


@pytest.mark.parametrize("step", [1, 2, 3])
@pytest.mark.parametrize(("trainers", "elsewhere"), [(2, {1}), (3, {0, 2})])
def test_who_is_elsewhere_is_known_to_all_others_until_it_is_back(
    trainers: int, elsewhere: set[int], step: int
) -> None:
    scenario = replace(SCENARIO, trainers=trainers)
    cluster = Elsewhere(scenario)
    cluster.until_step(step)
    cluster.elsewhere |= elsewhere
    begun_s = cluster.pass_time(LONG_S)
    for rank in set(range(trainers)) - elsewhere:
        client = cluster.clients[f"trainer-{rank}"]
        assert client.awaited == sorted(elsewhere)
        at_s = [at_s for at_s in cluster.patient_s[rank] if at_s >= begun_s]
        pauses_s = [b - a for a, b in zip([begun_s, *at_s], [*at_s, begun_s + LONG_S], strict=True)]
        assert max(pauses_s) <= 3 * LOOK_MOST_S, "often enough for a wait that is given up after a minute"
    for rank in elsewhere:
        assert not cluster.clients[f"trainer-{rank}"].awaited
    cluster.elsewhere.clear()
    cluster.go().check_against(simulate(scenario))


@pytest.mark.parametrize("slot", range(3))
@pytest.mark.parametrize("elsewhere", [set(), {1}])
def test_nobody_is_patient_with_a_cluster_that_does_not_answer(elsewhere: set[int], slot: int) -> None:
    cluster = Elsewhere(SCENARIO)
    cluster.until_step(2)
    cluster.elsewhere |= elsewhere
    cluster.hang(slot)
    cluster.pass_time(3 * LOOK_MOST_S)
    begun_s = cluster.pass_time(LONG_S)
    assert not [at_s for known_s in cluster.patient_s.values() for at_s in known_s if at_s >= begun_s]
    assert not any(client.awaited for client in cluster.clients.values())


def test_nobody_is_patient_with_a_trainer_that_is_done() -> None:
    cluster = Elsewhere(SCENARIO)
    cluster.until_step(2)
    cluster.elsewhere.add(1)
    cluster.pass_time(3 * LOOK_MOST_S)
    assert cluster.clients["trainer-0"].awaited == [1]
    told: list[BaseException] = []
    cluster.clients["trainer-0"].on_error = told.append
    cluster.plane.tell(cluster.process_of["trainer-1"], messages.Leave())
    cluster.pass_time(3 * LOOK_MOST_S)
    begun_s = cluster.pass_time(3 * LOOK_MOST_S)
    assert cluster.clients["trainer-0"].awaited == []
    assert not [at_s for at_s in cluster.patient_s[0] if at_s >= begun_s]
    assert re.match(r"step \d waits for trainer 1, which left the cluster, done\. If its loop is sh", str(told[0]))


def test_a_trainer_finds_out_that_another_one_has_trained_meanwhile() -> None:
    cluster = Elsewhere(SCENARIO)
    found: dict[int, list[bool]] = {0: [], 1: []}

    def look() -> None:
        for rank, mine in found.items():
            client = cluster.clients[f"trainer-{rank}"]
            client.run(client.overtaken, mine.append)

    cluster.until_step(2)
    cluster.elsewhere.add(1)
    cluster.pass_time(LONG_S)
    look()
    cluster.pass_time(LOOK_MOST_S)
    cluster.elsewhere.clear()
    cluster.pass_time(LONG_S)
    look()
    cluster.pass_time(LOOK_MOST_S)
    assert found == {0: [False, False], 1: [True, False]}


ALONE: dict[str, tuple[Callable[[DistributedModelParallel], object], str]] = {
    "attaches": (lambda model: model.attach(), "this trainer trains, .* or optimizers .* attached of this one"),
    "saves": (lambda model: checkpoint.save(model, "nowhere"), "saves or loads by `torch_ecrec.checkpoint`, and"),
}


@pytest.mark.parametrize("who", range(2))
@pytest.mark.parametrize("does", ALONE)
def test_one_that_does_something_alone_is_told_and_waits_for_nobody(does: str, who: int) -> None:
    """Trainer 0 for the other one, say, which would wait in its first lookup for trainer 0's weights."""
    ended: list[int] = []
    do, says = ALONE[does]

    def script(rank: int, session: TurnsSession) -> None:
        model = DistributedModelParallel(Net(collection()), device=CPU, session=session)
        with pytest.raises(RuntimeError, match="and another one does something else") as error:
            if rank == who:
                do(model)
            model(batch_of(4, rank))[0].backward()
        assert (re.search(says, str(error.value)) is not None) == (rank == who)
        ended.append(rank)

    Trainers(job_of(Net(collection()), trainers=2), script).go()
    assert sorted(ended) == [0, 1]


def test_status_says_for_whom() -> None:
    h = Harness(trainers=3).start()
    h.say("trainer-0", type="beat", report={"awaits": [1, 2]})
    text = format_status(h.core.status(h.now_s))
    assert "waits for trainers 1, 2" in text and len(re.findall(r"^ +trainer-\d.* training ", text, re.M)) == 2
    h.say("trainer-0", type="beat", report={"awaits": []})
    assert "waits for" not in format_status(h.core.status(h.now_s))


# before there is a cluster ------------------------------------------------------------------------------------------


def gathered(h: Harness, name: str) -> list[dict[str, Any]]:
    return [word for member, word in h.sent if member == name and word["type"] == "gathering"]


def test_a_trainer_hears_at_once_and_again_whom_the_cluster_lacks() -> None:
    h = Harness()
    h.trainer(0)
    assert gathered(h, "trainer-0") == [{"type": "gathering", "servers": (0, 3), "trainers": (1, 2)}]
    for _ in range(48):
        h.now_s += 0.25
        h.say("trainer-0", type="beat")
        h.core.on_tick(h.now_s)
    assert len(gathered(h, "trainer-0")) == 3, "every five seconds"
    text = format_status(h.core.status(h.now_s))
    assert text.startswith("WARN: the cluster has not begun: 0 of 3 servers and 1 of 2 trainers are there\n  to do: a ")
    assert "server is started by: torch-ecrec serve" in text and re.search(r"^ +trainer-0 .* waiting ", text, re.M)
    h.server()
    assert gathered(h, "trainer-0")[-1]["servers"] == (1, 3) and len(gathered(h, "server-0")) == 1


def test_servers_hear_it_when_it_changes_and_not_for_as_long_as_nobody_trains() -> None:
    h = Harness()
    for _ in range(3):
        h.server()
    for _ in range(400):
        h.now_s += 0.25
        for i in range(3):
            h.say(f"server-{i}", type="beat")
        h.core.on_tick(h.now_s)
    assert [word["servers"] for word in gathered(h, "server-0")] == [(1, 3), (2, 3), (3, 3)]
    assert gathered(h, "server-0")[-1]["trainers"] == (0, 0), "nobody knows yet how many there will be"
    assert "a trainer is a script" in format_status(h.core.status(h.now_s))


def test_once_it_has_begun_nothing_of_that_is_said() -> None:
    h = Harness().start()
    count = len([word for _, word in h.sent if word["type"] == "gathering"])
    h.lose("server-1")
    h.now_s += 60.0
    h.core.on_tick(h.now_s)
    assert len([word for _, word in h.sent if word["type"] == "gathering"]) == count
