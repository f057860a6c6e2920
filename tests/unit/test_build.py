"""Whether two builds understand each other: what a declaration says, and who is told that they do not."""

from __future__ import annotations

import dataclasses
import types
from typing import Annotated, Any

import msgspec
import pytest
import torch
from builds import BUILD

import torch_ecrec
from torch_ecrec.protocol import build, wire
from torch_ecrec.protocol.build import Build, declaration, own_build, specification
from torch_ecrec.protocol.encoding import WIRE, Vocabulary
from torch_ecrec.protocol.messages import BadMessage, Join, from_member
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


def test_another_job_or_other_kernels_are_another_build(monkeypatch: pytest.MonkeyPatch) -> None:
    """A field of a table that the other side does not know would end it; other kernels might give other bits."""
    mine = own_build(Vocabulary([Ask]))
    monkeypatch.setattr(build, "digest_of_sources", lambda: "of others")
    monkeypatch.setattr(build, "JobSpec", dataclasses.make_dataclass("JobSpec", [("tables", tuple[TableSpec, ...])]))
    other = own_build(Vocabulary([Ask, wire.Versions]))
    assert mine.difference(other).endswith("but not the same: JobSpec, Versions, VersionsAre, kernels")
    assert specification(JobSpec).startswith("JobSpec(tables: tuple[TableSpec, Ellipsis], code: CodeSpec, ")
    assert "; TableSpec(name: str, " in specification(JobSpec) and "; OptimizerSpec(kind: str, " in specification(
        JobSpec
    )


def test_builds_that_are_alike() -> None:
    mine, other = own_build(), own_build(Vocabulary(list(WIRE.requests.values())))
    assert mine == other and mine.digest == other.digest and mine.difference(other) == ""
    assert mine.difference_told(other.told()) == ""
    assert set(mine.messages) == {*WIRE.requests, *WIRE.answers, "JobSpec", "kernels"}
    later = Build("9.9.9", mine.messages)
    assert later.digest != mine.digest and mine.difference(later) == f"version 9.9.9, here {mine.version}"


JOINS = {"type": "join", "role": "server", "pid": 1, "birth": "one"}


@pytest.mark.parametrize(
    ("said", "says"),
    [
        ({"version": "0.0.0"}, f"version 0.0.0 joins a cluster of version {torch_ecrec.__version__}"),
        ({"messages": {**BUILD["messages"], "Push": "x", "Pull": "y"}}, "another build: .* not the same: Pull, Push"),
        ({"messages": {"Push": BUILD["messages"]["Push"]}}, "not the same: Acknowledged, Adopt, "),
        ({"messages": {**BUILD["messages"], "Push": "x"}, "pid": "?"}, "not the same: Push"),
        ({"messages": {}}, "messages"),
        ({"messages": ["Push"]}, "messages"),
        ({"messages": None}, "messages"),
    ],
)
def test_a_process_of_another_build_does_not_join(said: dict[str, Any], says: str) -> None:
    """It is told so before anything else of its message is looked at."""
    assert isinstance(from_member({**JOINS, **BUILD}), Join)
    with pytest.raises(BadMessage, match=says):
        from_member({**JOINS, **BUILD, **said})
