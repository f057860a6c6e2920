"""What a status tells beside who is there: how fast it goes, what may be lost, what a process takes of its host."""

from __future__ import annotations

import itertools
import os
import socket
from pathlib import Path

import pytest
import torch
from coordinator_harness import MEMBERS, Harness, known, rejoin
from coordinator_words import slot_report
from msgspec.structs import replace
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torch_ecrec.coordinator import domains
from torch_ecrec.coordinator.members import MemberRecord
from torch_ecrec.coordinator.progress import WINDOW_S, Progress
from torch_ecrec.nn.repeats import samples_of
from torch_ecrec.observe.verdict import verdict_of
from torch_ecrec.processes.footprint import footprint
from torch_ecrec.protocol import messages
from torch_ecrec.protocol.messages import SlotPlace
from torch_ecrec.protocol.status import Report, Trained
from torch_ecrec.spec.job import CodeSpec

# how fast ---------------------------------------------------------------------------------------------


def server(name: str, slot: int, incarnation: int = 0, step: int = 0, rebuilt: float = 1.0) -> MemberRecord:
    told = slot_report(slot, incarnation, step=step, rebuilt=rebuilt, record_bytes=600, parity_bytes=400)
    return MemberRecord(name, "server", -1, 1, name, 0.0, 0.0, report=Report(slots=[told]))


def trainer(rank: int, step: int, samples: int) -> MemberRecord:
    report = Report(trained=Trained(step, samples))
    return MemberRecord(f"trainer-{rank}", "trainer", rank, 1, f"t{rank}", 0.0, 0.0, report=report)


def test_a_rate_is_of_the_last_seconds() -> None:
    progress = Progress()
    assert progress.rate() is None and progress.still_s(5.0) is None
    progress.on_tick([], [], 0.0)
    assert progress.still_s(5.0) == 5.0
    progress = Progress()
    for i in range(400):
        now_s = i * 0.25
        step = int(4 * min(now_s, 50.0))  # four a second, and then it stands
        progress.on_tick(
            [server("server-0", 0, step=step), trainer(0, step, 100 * step)], [SlotPlace("server-0", 0, True)], now_s
        )
        if now_s == 40.0:
            rate = progress.rate()
            assert (
                rate is not None
                and rate.steps_per_s == pytest.approx(4.0)
                and rate.over_s == pytest.approx(WINDOW_S, abs=1)
            )
            assert rate.samples_per_s == pytest.approx(400.0) and progress.still_s(40.0) == 0.0 and progress.step == 160
    assert progress.rate() is None and progress.still_s(99.75) == pytest.approx(49.75), "nothing was done of late"


def test_where_training_was_before_it_is_known_is_no_rate() -> None:
    """After a restore, and after a coordinator was started again: nobody has said a step yet."""
    progress = Progress()
    for now_s, step in ((0.0, 0), (1.0, 0), (2.0, 100_000), (3.0, 100_002), (4.0, 100_004)):
        progress.on_tick([server("server-0", 0, step=step)], [SlotPlace("server-0", 0, True)], now_s)
    rate = progress.rate()
    assert rate is not None and rate.steps_per_s == pytest.approx(2.0)


def test_a_rate_begins_anew_where_training_goes_back_and_where_a_trainer_is_started_again() -> None:
    progress = Progress()
    place = [SlotPlace("server-0", 0, True)]
    for i in range(20):
        progress.on_tick([server("server-0", 0, step=i), trainer(0, i, 10 * i)], place, i * 0.5)
    assert progress.rate() is not None
    progress.on_tick([server("server-0", 0, step=3), trainer(0, 3, 0)], place, 10.0)
    assert progress.rate() is None and progress.step == 3
    progress.on_tick([server("server-0", 0, step=5), trainer(0, 5, 20)], place, 12.0)
    rate = progress.rate()
    assert rate is not None and rate.steps_per_s == 1.0 and rate.samples_per_s == 10.0


def test_a_slot_that_is_filled_says_how_fast_and_until_when() -> None:
    progress = Progress()
    assert progress.filling(1, 1) is None
    for i in range(11):  # 5 % a second
        progress.on_tick(
            [server("server-3", 1, 1, rebuilt=0.05 * i)],
            [SlotPlace("", 0, True), SlotPlace("server-3", 1, False)],
            float(i),
        )
        if i == 0:
            filling = progress.filling(1, 1)
            assert filling is not None and (filling.share, filling.bytes_per_s, filling.left_s) == (0.0, None, None)
    filling = progress.filling(1, 1)
    assert filling is not None and filling.share == 0.5
    assert filling.bytes_per_s == pytest.approx(50.0) and filling.left_s == pytest.approx(10.0)
    assert progress.filling(1, 2) is None, "another life of it"
    progress.on_tick(
        [server("server-3", 1, 1, rebuilt=0.1)], [SlotPlace("", 0, True), SlotPlace("server-3", 2, False)], 11.0
    )
    assert progress.filling(1, 1) is None and progress.filling(1, 2) is None, "its new host has said nothing yet"
    progress.on_tick([], [SlotPlace("", 0, True), SlotPlace("server-3", 1, True)], 12.0)
    assert progress.filling(1, 1) is None


def test_samples_are_counted_as_the_features_or_the_first_tensor_say() -> None:
    lengths = torch.tensor([1, 0, 2, 1])
    plain = KeyedJaggedTensor(["a", "b"], torch.arange(4), lengths=lengths)
    assert samples_of(plain) == 2 and samples_of((torch.zeros(7, 3),)) == 7
    assert samples_of((torch.zeros(7, 3), plain)) == 2, "features know it best"
    assert samples_of([{"x": torch.zeros(5)}]) == 5 and samples_of(torch.tensor(1.0)) == 0
    varies = KeyedJaggedTensor(
        ["a", "b"], torch.arange(4), lengths=torch.tensor([1, 0, 2]), stride_per_key_per_rank=[[1], [2]],
        inverse_indices=(["a", "b"], torch.tensor([[0, 0, 0, 0, 0], [0, 1, 1, 0, 1]])),
    )  # fmt: skip
    assert samples_of(varies) == 5

    class Batch:
        def __init__(self) -> None:
            self.dense, self.sparse, self.itself = torch.zeros(9, 2), plain, self

    assert samples_of((Batch(),), 3) == 2 and samples_of(("nothing", 3, None)) == 0


# what may be lost -------------------------------------------------------------------------------------


@pytest.mark.parametrize("r", [1, 2])
@pytest.mark.parametrize("slots", [4, 6])
def test_so_many_servers_may_be_lost_as_each_set_of_them_says(slots: int, r: int) -> None:
    """Against the code itself, with slots on fewer servers than there are, and some that lack records."""
    code = CodeSpec(slots, 2, r)

    def is_loss(gone: set[int]) -> bool:  # windows of k + r neighbours, as rows lie
        return any(len(gone & {(at + i) % slots for i in range(2 + r)}) > r for at in range(slots))

    for servers in range(1, slots + 1):
        hosted = {f"server-{i}": list(range(i, slots, servers)) for i in range(servers)}
        for lacking in ((), (0,), (1, 2)):
            best = 0
            for count in range(1, r + 1):
                sets = list(itertools.combinations(hosted.values(), count))
                if (
                    is_loss(set(lacking))
                    or not sets
                    or any(is_loss({*lacking, *itertools.chain(*one)}) for one in sets)
                ):
                    break
                best = count
            assert domains.losses(hosted, lacking, code.r, is_loss) == best, (servers, lacking)


def test_of_many_servers_it_is_what_any_code_repairs() -> None:
    hosted = {f"server-{i}": [i] for i in range(1000)}
    asked = []

    def is_loss(gone: set[int]) -> bool:
        asked.append(gone)
        return len(gone) > 3

    assert domains.losses(hosted, (), 3, is_loss) == 3
    assert domains.losses(hosted, (7,), 3, is_loss) == 2
    assert domains.losses({**hosted, "server-0": [0, 1001]}, (), 3, is_loss) == 2
    assert len(asked) < 20


def test_a_coordinator_says_what_may_be_lost_and_of_which_host() -> None:
    h = Harness(CodeSpec(4, 2, 2), spares=1).start(domains=["r/a", "r/b", "r/c", "r/d", "r/a"])
    safe = h.core.status(h.now_s).redundancy
    assert safe is not None and (safe.losses, safe.of, safe.spares, safe.elsewhere) == (2, 2, 1, True)
    assert [one.domain for one in safe.hosts] == ["r/a", "r/b", "r/c", "r/d"]
    assert all(one.may_be_lost and one.why == "" for one in safe.hosts) and len(safe.hosts[0].servers) == 2
    lost = h.places[1]
    h.lose(lost)
    said = h.core.status(h.now_s + 4.0)
    assert said.redundancy is not None and said.redundancy.losses == 1 and said.redundancy.spares == 0
    gone = said.member(lost)
    assert gone.gone_s == 4.0 and gone.why_gone == "eof" and not gone.present
    h.rebuilt(1)
    assert h.core.status(h.now_s).redundancy == replace(said.redundancy, losses=2)
    h.lose(h.places[0])  # no spare is left: a survivor hosts two slots
    h.rebuilt(0)
    safe = h.core.status(h.now_s).redundancy
    assert safe is not None and safe.losses < 2 == safe.of
    assert Harness().core.status(0.0).redundancy is None, "nothing is placed"


def test_a_coordinator_that_was_started_again_says_who_is_awaited() -> None:
    before, after = Harness().start(), Harness()
    said = before.core.status(before.now_s)
    assert said.regathering is None and said.wanted_trainers == 2
    addresses = {name: ["10.0.0.1", 7000 + i] for i, name in enumerate(MEMBERS)}
    for name in ("server-0", "trainer-0"):
        rejoin(after, known(before, name, addresses=addresses, world=list(MEMBERS)))
    back = after.core.status(after.now_s).regathering
    assert back is not None and back.back == ["server-0", "trainer-0"]
    assert back.missing == ["server-1", "server-2", "server-3", "trainer-1"]
    verdict = verdict_of(after.core.status(after.now_s))
    assert verdict.level == "WARN" and "waits for server-1, server-2, server-3 and trainer-1" in verdict.says


# what a process takes ---------------------------------------------------------------------------------


def write(folder: Path, **files: str) -> None:
    for name, text in files.items():
        path = folder / name.replace("__", "/").replace("_DOT_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


MEMINFO = "MemTotal:       1000 kB\nMemFree:         1 kB\nMemAvailable:    400 kB\n"


def test_this_process_says_what_it_takes() -> None:
    said = footprint()
    assert said.host == socket.gethostname() and 2**20 < said.resident_bytes < said.limit_bytes
    assert 0 < said.used_bytes <= said.limit_bytes
    assert messages.from_member(messages.json_of(messages.Beat(Report(process=said)))) == messages.Beat(
        Report(process=said)
    )


def test_the_narrowest_limit_counts(tmp_path: Path) -> None:
    proc, groups, page = tmp_path / "proc", tmp_path / "sys/fs/cgroup", os.sysconf("SC_PAGE_SIZE")
    write(proc, meminfo=MEMINFO, self__statm="9 5 1 1 0 1 0")
    said = footprint(tmp_path)
    assert (said.resident_bytes, said.limit_bytes, said.used_bytes) == (5 * page, 1000 * 1024, 600 * 1024)
    write(proc, self__cgroup="0::/job/task\n")
    write(
        groups,
        job__memory_DOT_max="500000",
        job__memory_DOT_current="450000",
        job__memory_DOT_stat="anon 1\ninactive_file 50000\n",
    )
    write(groups, job__task__memory_DOT_max="max", job__task__memory_DOT_current="7")
    said = footprint(tmp_path)
    assert (said.limit_bytes, said.used_bytes) == (500000, 400000), "that of the group around it"


def test_limits_of_the_first_version_of_control_groups(tmp_path: Path) -> None:
    proc, groups = tmp_path / "proc", tmp_path / "sys/fs/cgroup"
    write(proc, meminfo=MEMINFO, self__statm="9 5", self__cgroup="4:memory:/job\n3:cpu,cpuacct:/job\n")
    write(groups, memory__memory_DOT_limit_in_bytes=str(2**63 - 4096))
    write(groups, memory__job__memory_DOT_limit_in_bytes="300000", memory__job__memory_DOT_usage_in_bytes="100000")
    write(groups, memory__job__memory_DOT_stat="total_inactive_file 400000\n")
    said = footprint(tmp_path)
    assert (said.limit_bytes, said.used_bytes) == (300000, 0)


def test_what_the_system_does_not_tell_is_nothing(tmp_path: Path) -> None:
    said = footprint(tmp_path)
    assert (said.resident_bytes, said.limit_bytes, said.used_bytes) == (0, 0, 0)
    write(tmp_path / "proc", meminfo="MemTotal: many\n", self__statm="x", self__cgroup="nonsense\n\n0::\n")
    assert footprint(tmp_path).limit_bytes == 0
