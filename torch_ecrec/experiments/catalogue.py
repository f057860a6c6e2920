"""Reads the experiments from their files in `specs/`: TOML, checked as it is read."""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from torch_ecrec.experiments import emulation, modes, scale

FOLDER = Path(__file__).parent / "specs"


class Claim(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What an experiment is held against.

    Attributes:
        source: who claims it.
        says: the claim, in our words.
        figure: one of `figures.FIGURES`, computed of the experiment's cells.
        published: the claim's number; None: nobody has published one.
        wanted: what we want to reach.
        at_most: `wanted` and `published` are upper bounds, not lower ones.
    """

    source: str
    says: str
    figure: str
    published: float | None = None
    wanted: float
    at_most: bool = False


class Selection(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What of an experiment `run smoke` runs. What is not given is as in the experiment."""

    models: list[str] | None = None
    modes: list[str] | None = None
    workers: list[int] | None = None
    seeds: list[int] | None = None
    failures: list[int] | None = None
    repeats: int | None = None
    seconds: float | None = None


class Spec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One experiment.

    Attributes:
        name: that of its file.
        title, shows: what it asks, and which figures of the artefact answer that.
        kind: "undisturbed": all modes of a model train in turns; "kill": each cell trains, loses a server, and goes on.
            "accuracy" and "emulated": no cluster, but what `bench partial` emulates of one (`emulation.py`).
        models: names of `scale.MODELS`.
        modes: names that `modes.parse` knows; of an emulation, ways of recovery.
        workers: numbers of trainers.
        seeds: of models, batches, and moments of failures.
        failures: how many, of an emulation.
        options: arguments of `torch-ecrec bench partial`, for an emulation.
        repeats: turns of each mode; kills of each cell, one after the other.
        seconds: of training in a turn, or around a kill.
        kills: what a kill takes: the process of a server, or its host, each process being on a host of its own. Then
            the link goes down first, and what had not left the host is lost.
        link_mbit: the rate of the link of a server's host, then, in each direction, in 10^6 bits a second; 0: no limit.
        hosts: so many network namespaces, of which trainers have the first and servers the last; 0: this host.
        claims: what it is held against.
        theirs: the setting that the artefact names, where it is another one.
        smoke: what of it is run to see that it runs; None: nothing.
    """

    name: str
    title: str
    shows: str
    kind: Literal["undisturbed", "kill", "accuracy", "emulated"]
    models: list[str]
    modes: list[str]
    workers: list[int]
    seeds: list[int] = msgspec.field(default_factory=lambda: [0])
    failures: list[int] = msgspec.field(default_factory=lambda: [0])
    options: list[str] = msgspec.field(default_factory=list)
    repeats: int = 1
    seconds: float = 4.0
    kills: Literal["process", "host"] = "process"
    link_mbit: float = 0.0
    hosts: int = 0
    claims: list[Claim] = msgspec.field(default_factory=list)
    theirs: str = ""
    smoke: Selection | None = None

    @property
    def is_emulated(self) -> bool:
        """Whether there is no cluster."""
        return self.kind in ("accuracy", "emulated")

    def smoked(self) -> Spec:
        """Returns the small part of it that `run smoke` runs."""
        assert self.smoke is not None
        given = {name: value for name, value in msgspec.structs.asdict(self.smoke).items() if value is not None}
        return msgspec.structs.replace(self, **given)


def read(path: Path) -> Spec:
    """Reads one experiment from its file.

    Raises:
        ValueError: it is no experiment; the message names the file and what is wrong.
    """
    try:
        spec = msgspec.convert({"name": path.stem, **tomllib.loads(path.read_text(encoding="utf-8"))}, Spec)
    except (tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise ValueError(f"{path}: {error}") from error
    for one in (spec, *([spec.smoked()] if spec.smoke is not None else [])):
        for model in one.models:
            if model not in scale.MODELS:
                raise ValueError(f"{path}: {unknown('model', model, scale.MODELS)}")
        for mode in one.modes:
            try:
                emulation.require_way(mode) if one.is_emulated else modes.parse(mode)
            except ValueError as error:
                raise ValueError(f"{path}: {error}") from error
        if one.kind == "kill" and any(modes.parse(mode).beside for mode in one.modes):
            raise ValueError(f"{path}: how a checkpoint is written changes nothing of a kill: take Ckpt-30")
        if one.kills == "host" and (one.kind != "kill" or any(modes.parse(mode).interval_s for mode in one.modes)):
            raise ValueError(f'{path}: `kills = "host"` goes with `kind = "kill"`, and with modes without checkpoints')
        positive = [*one.workers, one.repeats, one.seconds]
        if min(positive) <= 0 or not all([one.models, one.modes, one.workers, one.seeds, one.failures]):
            raise ValueError(f"{path}: `workers`, `repeats` and `seconds` must be positive, and no list empty")
    return spec


def unknown(what: str, name: str, known: Sequence[str] | Mapping[str, Any]) -> str:
    """Returns the message for a name that is not known, with the one most like it."""
    like = difflib.get_close_matches(name.lower(), [one.lower() for one in known], 1, 0.5)
    nearest = next((one for one in known if like and one.lower() == like[0]), "")
    hint = f"; did you mean {nearest}?" if nearest else ""
    return f"unknown {what} {name!r}{hint} (there are {', '.join(known)})"


def _order(path: Path) -> tuple[int, str]:
    return ("normal", "recovery", "accuracy", "cpr").index(path.stem.partition("-")[0]), re.sub(
        r"\d+", lambda found: found[0].zfill(3), path.stem
    )


def all_specs(folder: Path = FOLDER) -> dict[str, Spec]:
    """Returns all experiments by their names, undisturbed ones first. Raises ValueError as `read` does."""
    return {path.stem: read(path) for path in sorted(folder.glob("*.toml"), key=_order)}


def chosen(name: str) -> list[Spec]:
    """Returns what `run NAME` runs: one experiment, "all" of them, or the small parts of "smoke".

    Raises:
        ValueError: there is no such experiment.
    """
    specs = all_specs()
    if name == "all":
        return list(specs.values())
    if name == "smoke":
        return [spec.smoked() for spec in specs.values() if spec.smoke is not None]
    if name not in specs:
        raise ValueError(unknown("experiment", name, [*specs, "all", "smoke"]))
    return [specs[name]]
