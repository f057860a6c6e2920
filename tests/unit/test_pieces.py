"""Dense snapshots in pieces: whatever is kept, however it is cut, it is the same when it has been gathered."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from torch_ecrec.protocol import pieces
from torch_ecrec.protocol.pieces import Gathering, Key, Part, cut
from torch_ecrec.protocol.wire import Snapshots


def part(rng: random.Random, size: int, step: int) -> Part:
    return [step, size, rng.randrange(1 << 40)], torch.frombuffer(
        bytearray(rng.randbytes(size) or b"\0"), dtype=torch.uint8
    )[:size]


def kept(rng: random.Random, steps: int, trainers: int, most: int) -> dict[Key, Part]:
    keys = [(step, trainer) for step in range(3, 3 + steps) for trainer in range(trainers)]
    rng.shuffle(keys)
    return {key: part(rng, rng.choice([0, 1, rng.randrange(most)]), key[0]) for key in keys}


def same(got: dict[Key, Part], wanted: dict[Key, Part]) -> bool:
    return got.keys() == wanted.keys() and all(
        got[key][0] == wanted[key][0] and torch.equal(got[key][1], wanted[key][1]) for key in wanted
    )


def gathered(parts: dict[Key, Part], of: int, change: Any = None) -> tuple[Gathering, list[Snapshots]]:
    got, answers = Gathering(of), []
    for i in range(10_000):
        answers.append(cut(parts, of, got.begin(1)))
        if got.take(answers[-1]):
            return got, answers
        if change is not None:
            change(i)
    raise AssertionError("it does not end")


@pytest.mark.parametrize("seed", range(20))
def test_what_is_cut_is_gathered_whole(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(seed)
    monkeypatch.setattr(pieces, "PIECE_BYTES", rng.choice([1, 7, 100, 5000]))
    monkeypatch.setattr(pieces, "PARTS_MOST", rng.choice([1, 2, 4096]))
    parts = kept(rng, rng.randrange(1, 5), rng.randrange(1, 9), 300)
    got, answers = gathered(parts, -1)
    assert same(got.parts, parts)
    for answer in answers:
        assert sum(map(len, answer.payloads)) <= pieces.PIECE_BYTES and len(answer.steps) <= pieces.PARTS_MOST
    whole = got.all()
    assert list(zip(whole.steps, whole.trainers, strict=True)) == sorted(parts)
    assert same(gathered(parts, 3)[0].parts, {key: value for key, value in parts.items() if key[0] == 3})
    assert not gathered(parts, 99)[0].parts


def test_small_snapshots_are_one_answer() -> None:
    parts = kept(random.Random(1), 4, 8, 1000)
    _, answers = gathered(parts, -1)
    assert len(answers) == 1 and not answers[0].more


@pytest.mark.parametrize("seed", range(40))
def test_what_changes_in_between_does_no_harm(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts are forgotten, replaced by others, and more come: what is gathered was there, whole, at some time; and what
    was there all along is gathered."""
    rng = random.Random(seed)
    monkeypatch.setattr(pieces, "PIECE_BYTES", rng.choice([7, 50, 400]))
    parts = kept(rng, 4, 4, 300)
    ever = {key: [value] for key, value in parts.items()}
    steady = set(parts)

    def change(i: int) -> None:
        if i > 100:
            return
        key = rng.choice(sorted(ever))
        kind = rng.randrange(6)
        if kind == 0 and parts.pop(key, None) is not None:
            steady.discard(key)
        elif kind == 1:
            parts[key] = part(rng, rng.randrange(300), key[0])
            ever[key].append(parts[key])
            steady.discard(key)
        elif kind == 2:
            key = (rng.randrange(20), rng.randrange(4))
            parts.setdefault(key, part(rng, 50, key[0]))
            ever.setdefault(key, []).append(parts[key])

    got, _ = gathered(parts, -1, change)
    assert steady <= got.parts.keys()
    for key, (header, payload) in got.parts.items():
        assert any(header == was[0] and torch.equal(payload, was[1]) for was in ever[key]), key


def test_another_life_of_a_keeper_is_asked_from_the_beginning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "PIECE_BYTES", 10)
    rng = random.Random(2)
    parts, got = {(1, 0): part(rng, 25, 1), (1, 1): part(rng, 5, 1)}, Gathering(-1)
    assert got.begin(3) == [] and not got.take(cut(parts, -1, []))
    assert got.begin(3) == [1, 0, 10]
    assert got.begin(4) == [] and not got.parts
    while not got.take(cut(parts, -1, got.begin(4))):
        pass
    assert same(got.parts, parts)


def test_answers_that_make_no_sense_are_refused() -> None:
    empty = torch.empty(0, dtype=torch.uint8)
    with pytest.raises(ValueError, match="snapshots of 1 steps with 0 payloads"):
        Gathering(-1).take(Snapshots([1], [0], [[1]], []))
    for more in ([1], [1, 2], [1, 2, 3, 4]):
        with pytest.raises(ValueError, match="goes on at"):
            Gathering(-1).take(Snapshots([1], [0], [[1]], [empty], more))
    got = Gathering(-1)
    assert not got.take(Snapshots([5], [0], [[1]], [empty], [5, 0, 3]))
    for more in ([5, 0, 3], [5, 0, 2], [4, 9, 9]):  # it would go on for ever
        with pytest.raises(ValueError, match="goes on at"):
            got.take(Snapshots([5], [0], [[1]], [empty], more))
