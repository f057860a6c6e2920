"""What the modes of the experiments are here.

    XDL                  our servers without protection: trains, and survives nothing
    Ckpt-30, Ckpt-60     the same with a checkpoint every so many minutes of the paper's time; after a loss everybody
                         goes back to the newest, and trains again what came after it. Training stands meanwhile
    Ckpt-30-beside       the same, written beside training
    ECRM-k2, ECRM-k4     parity over stripes of 2 or 4 data records, one parity; the dense model is kept after each step
    ...-minusNNRep       without keeping the dense model
    ...-minus2PC         a step is acknowledged when it is applied, not when its parity is
    ...-ranges1, -ranges10   a rebuild that locks so many ranges, one after the other
    ...-unlimited        a rebuild that reads as fast as it can
    ...-lessNetwork, -lessCPU   servers that have less of that (`limits.py`)

What comes after k2 or k4, but for the last two lines, are policies that give something up (docs/experiments.md).
Settings that begin with `TORCH_ECREC_EXPERIMENT_` choose them, and nothing else does.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from torch_ecrec.bench.experiment import Mode as Trained
from torch_ecrec.bench.experiment import parse_mode

MINUTE_S = 60.0
FORM = re.compile(
    r"XDL|Ckpt-(\d+)(-beside)?"
    r"|ECRM-k(\d+)((?:-minusNNRep)?(?:-minus2PC)?)(?:-ranges(\d+))?(-unlimited)?(?:-(lessNetwork|lessCPU))?"
)


@dataclass(frozen=True)
class Mode:
    """A mode of the experiments.

    Attributes:
        name: as above.
        k: data records in a stripe; 0: no parity.
        interval_s: seconds of the paper's time between two checkpoints; 0: none are written.
        beside: they are written beside training, which does not stand meanwhile.
        replicates: the dense model is kept by servers after each step.
        settings: of all processes, as environment variables.
        limit: what its servers have less of, one of `limits.LIMITS`; "": nothing.
    """

    name: str
    k: int = 0
    interval_s: float = 0.0
    beside: bool = False
    replicates: bool = False
    settings: Mapping[str, str] = field(default_factory=dict)
    limit: str = ""

    @property
    def system(self) -> str:
        """What takes a turn: the mode, but those with checkpoints that differ only in how often are one."""
        return ("Ckpt-beside" if self.beside else "Ckpt") if self.interval_s else self.name

    @property
    def trained(self) -> Trained:
        """The mode as benchmarks run it. Modes of one group share their processes, and these do not."""
        base = parse_mode(f"k{self.k}r1" if self.k else "none")
        group = self.system.removesuffix(f"-{self.limit}")
        return Trained(self.name, group, base.code, self.settings, self.replicates, False)


def parse(name: str) -> Mode:
    """Returns a mode by its name. Raises ValueError."""
    found = FORM.fullmatch(name)
    if found is None:
        raise ValueError(
            f"unknown mode {name!r}; there are XDL, Ckpt-30, Ckpt-30-beside, ECRM-k2, ECRM-k4, with -minusNNRep,"
            " -minus2PC or both, -ranges1 or -ranges10, -unlimited, -lessNetwork or -lessCPU"
        )
    minutes, beside, k, less, ranges, unlimited, limit = found.groups()
    if minutes is not None:
        return Mode(name, interval_s=int(minutes) * MINUTE_S, beside=beside is not None)
    if k is None:
        return Mode(name)
    settings = {}
    if less:
        settings["TORCH_ECREC_EXPERIMENT_MODE"] = less.removeprefix("-")
    if ranges is not None:
        settings["TORCH_ECREC_EXPERIMENT_RANGES"] = ranges
    if unlimited:
        settings["TORCH_ECREC_REBUILD_BYTES_PER_S"] = "0"
    return Mode(name, int(k), replicates="minusNNRep" not in less, settings=settings, limit=limit or "")
