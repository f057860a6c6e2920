"""Modes that give up a part of what the protocol promises, so that experiments can measure what that part costs.

They are those of the evaluation of ECRec (PVLDB 2023, arXiv:2104.01981). No cluster has one by accident: only settings
whose names begin with TORCH_ECREC_EXPERIMENT_ choose them, all members must have the same, and a status says so.

    TORCH_ECREC_EXPERIMENT_MODE=minus2PC      a step is acknowledged before it survives a loss
    TORCH_ECREC_EXPERIMENT_RANGES=10          a rebuild locks ten ranges of a slot, one after another

docs/experiments.md says what each mode gives up, and what it is for.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass

from torch_ecrec.runtime.checks import require_int

PREFIX = "TORCH_ECREC_EXPERIMENT_"
MODES = ("minus2PC", "minusNNRep", "minusNNRep-minus2PC")  # as the paper names them
RANGES_MOST = 1 << 20


@dataclass(frozen=True)
class Experiment:
    """Says what a cluster leaves out, or does otherwise, for the sake of an experiment.

    Args:
        mode: one of `MODES`; "": none.
        ranges: how many ranges of a slot a rebuild locks, one after another; 0: it locks nothing.

    Raises:
        ValueError: there is no such mode, or `ranges` is out of range.
    """

    mode: str = ""
    ranges: int = 0

    def __post_init__(self) -> None:
        if self.mode and self.mode not in MODES:
            modes = {_parts_of(mode): mode for mode in MODES}
            (near,) = difflib.get_close_matches(_parts_of(self.mode[:80]), modes, 1, 0.0)
            raise ValueError(
                f"`experiment_mode` must be one of {', '.join(MODES)}, got {self.mode!r}; did you mean {modes[near]}?"
            )
        require_int("experiment_ranges", self.ranges, 0, RANGES_MOST)

    def __bool__(self) -> bool:
        return bool(self.mode or self.ranges)

    @property
    def acknowledges_when_applied(self) -> bool:
        """Whether a step is acknowledged as soon as its slot has applied it (minus2PC)."""
        return "minus2PC" in self.mode.split("-")

    @property
    def keeps_no_dense_snapshots(self) -> bool:
        """Whether no dense snapshots are sent to servers (minusNNRep)."""
        return "minusNNRep" in self.mode.split("-")

    def variables(self) -> dict[str, str]:
        """Returns the settings that choose it, by the name of the variable; those that choose nothing are left out."""
        said = {f"{PREFIX}MODE": self.mode, f"{PREFIX}RANGES": str(self.ranges or "")}
        return {name: value for name, value in said.items() if value}

    def gives_up(self) -> list[str]:
        """Returns a clause for each thing that is not as it is without the experiment, for people."""
        said = []
        if self.acknowledges_when_applied:
            said.append(
                "a step is acknowledged before it survives a loss: one that is lost with a server is lost for good"
            )
        if self.keeps_no_dense_snapshots:
            said.append("no dense snapshots are kept: the job ends when trainers are lost")
        if self.ranges:
            said.append(f"a rebuild locks {self.ranges} ranges of a slot, one after another, and who needs them waits")
        return said

    def __str__(self) -> str:
        return (
            f"{' '.join(f'{name}={value}' for name, value in self.variables().items())}: {'; '.join(self.gives_up())}"
        )


def _parts_of(mode: str) -> str:
    """A mode as it is compared with others: however its parts are ordered, and its letters written."""
    return "-".join(sorted(mode.lower().split("-")))


def difference(theirs: Mapping[str, str], ours: Mapping[str, str]) -> str:
    """Returns in which setting a process that joins differs from its cluster; "": in none.

    Args:
        theirs, ours: as `Experiment.variables` gives them. Others than those of experiments are not looked at.
    """
    for name in sorted({*theirs, *ours}):
        mine, other = ours.get(name, ""), theirs.get(name, "")
        if name.startswith(PREFIX) and mine != other:
            here, there = (repr(value[:40]) if value else "not set" for value in (mine, other))
            return f"{name} is {here} in this cluster, and {there} in the process that joins: all must have the same"
    return ""
