"""Whether two builds understand each other: what a declaration says, and who is told that they do not."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import types
from dataclasses import replace
from typing import Annotated, Any

import msgspec
import pytest
import torch
from builds import BUILD

import torch_ecrec
from torch_ecrec.processes.kernel_bits import digest_of_steps, kernel_bits
from torch_ecrec.protocol import build, wire
from torch_ecrec.protocol.build import (
    Build,
    declaration,
    digests_of_words,
    other_bits,
    own_build,
    specification,
)
from torch_ecrec.protocol.encoding import WIRE, Vocabulary
from torch_ecrec.protocol.messages import BadMessage, Join, Said, from_member, whole_build
from torch_ecrec.records.optimizers import NAMES, optimizer
from torch_ecrec.spec.job import JobSpec, TableSpec

Small = Annotated[int, msgspec.Meta(ge=0, le=9)]
Rank3 = wire.TensorOf("Rank3", 3, (torch.float32,))


class Ask(wire.Request[wire.Rows | wire.Forgotten]):
    names: list[str]
    of: dict[int, Small] | None


def variant(**changes: Any) -> type[wire.Request[Any]]:
    """`Ask` with other fields, or other answers."""
    fields = {"names": list[str], "of": dict[int, Small] | None, **changes}
    answers = fields.pop("answers", wire.Rows | wire.Forgotten)
    order = fields.pop("order", list(fields))
    body = {"__annotations__": {name: fields[name] for name in order}, "__module__": __name__}
    made: type[wire.Request[Any]] = types.new_class(
        "Ask", (wire.Request[answers],), {}, lambda space: space.update(body)
    )
    return made


def test_a_declaration_says_all_that_the_bytes_depend_on() -> None:
    count = "int ge=-1 le=281474976710656"
    assert declaration(Ask) == (
        f"Ask(slot: {count}, incarnation: {count}, names: list[str], of: dict[int, int ge=0 le=9] | NoneType,"
        f" era: {count}) -> Forgotten | Rows"
    )
    values = "2-D float32 or bfloat16"
    assert declaration(wire.Rows) == f"Rows(weights: list[{values} or uint8], pooled: list[{values}])"
    bags = "Bags(positions: 1-D int32, lengths: 1-D int32, factors: 1-D float32 | NoneType)"
    assert f"bags: list[{bags}]" in declaration(wire.Push), "what is within a message, too"
    assert declaration(variant()) == declaration(Ask)


@pytest.mark.parametrize(
    "changes",
    [
        {"names": list[int]},
        {"names": list[Rank3]},
        {"more": int},
        {"of": dict[int, int] | None},
        {"of": dict[int, Small]},
        {"order": ["of", "names"]},
        {"order": ["names"]},
        {"answers": wire.Rows},
        {"answers": wire.Rows | wire.Forgotten | wire.Records},
    ],
    ids=str,
)
def test_a_message_that_is_declared_otherwise_is_named(changes: dict[str, Any]) -> None:
    mine, other = (own_build(Vocabulary([kind, wire.Push])) for kind in (Ask, variant(**changes)))
    assert mine.digest != other.digest
    assert f"the same version {torch_ecrec.__version__}, but not the same: Ask" in mine.difference(other)


def test_another_job_or_another_compiler_is_another_build(monkeypatch: pytest.MonkeyPatch) -> None:
    """A field of a table that the other side does not know would end it; another Numba might give other bits."""
    mine = own_build(Vocabulary([Ask]))
    monkeypatch.setattr(build.importlib.metadata, "version", lambda package: f"another {package}")
    monkeypatch.setattr(build, "JobSpec", dataclasses.make_dataclass("JobSpec", [("tables", tuple[TableSpec, ...])]))
    other = own_build(Vocabulary([Ask, wire.Versions]))
    assert mine.difference(other).endswith("but not the same: JobSpec, Numba, Versions, VersionsAre")
    assert specification(JobSpec).startswith("JobSpec(tables: tuple[TableSpec, Ellipsis], code: CodeSpec, ")
    assert "; TableSpec(name: str, " in specification(JobSpec) and "; OptimizerSpec(kind: str, " in specification(
        JobSpec
    )


def test_builds_that_are_alike() -> None:
    mine, other = own_build(), own_build(Vocabulary(list(WIRE.requests.values())))
    assert mine == other and mine.digest == other.digest and mine.difference(other) == ""
    assert mine.difference_told(other.told()) == ""
    assert set(mine.messages) == {*WIRE.requests, *WIRE.answers, "JobSpec", "Numba", "protocol"}
    later = Build("9.9.9", mine.messages)
    assert later.digest == mine.digest and mine.difference(later) == "", "the release's version decides nothing"
    other = Build("9.9.9", {**mine.messages, "protocol": "9"})
    assert mine.difference(other) == f"version 9.9.9, here {mine.version}; protocol 9, here {build.PROTOCOL}"


def test_every_word_between_members_is_declared() -> None:
    """Also its defaults and the type that it says: what is left out of a line means the same to both."""
    declared = {name for name in whole_build().messages if name.startswith(build.WORD)}
    assert {"word Join", "word Rejoin", "word Beat", "word Placed", "word Die"} < declared
    assert not declared & {"word AskStatus", "word Compare", "word Drain"}, "tools are answered, whatever they are"

    def digest(tag: str, default: int) -> str:
        made = msgspec.defstruct("Ready", [("at", int, default)], bases=(Said,), tag=tag, frozen=True)
        return digests_of_words([made])["word Ready"]

    assert len({digest("ready", 0), digest("ready", 1), digest("set", 0)}) == 3 and digest("a", 0) == digest("a", 0)


PROTOCOLS = {1: "08983ff4defb8fe2"}
"""A digest of all that decides whether builds may serve together, by protocol."""


def test_what_decides_has_changed_only_with_the_protocol() -> None:
    """It fails where a declaration, or what a kernel gives, is another one than this protocol had.

    Was a release made of this protocol? Then raise `PROTOCOL` in protocol/build.py, and add a line here. Else no two
    builds of it have met: put the new digest in place of the old one.
    """
    said = {**whole_build().messages, **kernel_bits()}
    said.pop("Numba")  # of this machine
    digest = hashlib.blake2b(json.dumps(sorted(said.items())).encode(), digest_size=8).hexdigest()
    assert PROTOCOLS[build.PROTOCOL] == digest, f"protocol {build.PROTOCOL} is now {digest}"
    assert max(PROTOCOLS) == build.PROTOCOL


def test_what_kernels_give_is_told_by_name() -> None:
    bits = kernel_bits()
    assert {f"{build.BITS}{name}" for name in NAMES} < set(bits) and len(set(bits.values())) == len(bits)
    assert kernel_bits.__wrapped__() == bits, "the same every time"
    assert other_bits("1", bits, "2", bits) == "" and other_bits("1", {}, "2", bits) == ""
    says = other_bits("0.1.1", {**bits, "bits of adam": "x"}, "0.1.0", bits)
    assert "(version 0.1.1, there 0.1.0): bits of adam. They cannot serve one cluster" in says


@pytest.mark.parametrize("name", NAMES)
def test_another_constant_of_an_optimizer_gives_other_bits(name: str) -> None:
    """Of every hyperparameter, also of one that is 0 if it is not given; and of what the kernel is given."""
    one = optimizer(name)
    mine = digest_of_steps(one)
    for fixed, default in one.fixed.items():
        choices = [value for value in one.choices.get(fixed, ()) if value != default]
        other = choices[0] if choices else default * 1.001 if default else 0.001
        assert digest_of_steps(replace(one, fixed={**one.fixed, fixed: other})) != mine, fixed
    later = replace(one, of_step=lambda lr, *more: [1.001 * lr, *list(one.of_step(lr, *more))[1:]])
    assert digest_of_steps(later) != mine


JOINS = {"type": "join", "role": "server", "pid": 1, "session_id": "one"}


@pytest.mark.parametrize(
    ("said", "says"),
    [
        (
            {"version": "0.0.0", "messages": {**BUILD["messages"], "protocol": "0"}},
            f"another build: version 0.0.0, here {torch_ecrec.__version__}; protocol 0, here 1. They cannot serve",
        ),
        ({"version": None}, "version"),
        ({"messages": {**BUILD["messages"], "Push": "x", "Pull": "y"}}, "another build: .* not the same: Pull, Push"),
        ({"messages": {"Push": BUILD["messages"]["Push"]}}, "protocol none, here 1"),
        ({"messages": {**BUILD["messages"], "word Ready": "x"}}, "not the same: word Ready"),
        ({"messages": {**BUILD["messages"], "Push": "x"}, "pid": "?"}, "not the same: Push"),
        ({"messages": {}}, "messages"),
        ({"messages": ["Push"]}, "messages"),
        ({"messages": None}, "messages"),
    ],
)
def test_a_process_of_another_build_does_not_join(said: dict[str, Any], says: str) -> None:
    """It is told so before anything else of its message is looked at."""
    assert isinstance(from_member({**JOINS, **BUILD}), Join)
    assert isinstance(from_member({**JOINS, **BUILD, "version": "0.0.9"}), Join)
    with pytest.raises(BadMessage, match=says):
        from_member({**JOINS, **BUILD, **said})
