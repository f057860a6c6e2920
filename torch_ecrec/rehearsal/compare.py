"""Compares two runs of a script step by step, from what their trainers recorded. Pure.

    traces      records of all files -> a `Trace` for each trainer
    difference  the first step at which one run is not the other
    moments     at which steps trainers are killed, where nobody has said
    equal, different, ...   verdicts: what the user reads

A run that was disturbed has several lives. Each step of each life must be what it was in the undisturbed run; a step
that was made again counts as often as it was made.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from torch_ecrec.observe.trace import (
    ATTACHED,
    BATCH,
    BUFFERS,
    DENSE,
    GRADIENTS,
    IDS,
    OPTIMIZERS,
    ORDER,
    RATES,
    Begun,
    Ended,
    Held,
    Kept,
    Record,
    Resumed,
    Trained,
    Warned,
)

Values = Mapping[str, int]

COUNTS = "a count, a local variable that a step changes"
CAUSES = {
    BATCH: "samples that the loop changes or chooses itself: by a count of its own (`enumerate`), with a generator of"
    " its own, or from a second reader that is not attached",
    IDS: "ids that the loop or the model draws: negative samples, hashing with a state",
    RATES: f"a warm-up or schedule that goes by {COUNTS}, a scheduler that is not attached, or rates of the tables'"
    " optimizers that nobody brings back (attach `model.fused_optimizer`, too)",
    GRADIENTS: "something that the loss depends on and that is neither the batch nor the model: an annealed weight, a"
    " count of steps, a module's attribute or mode (`train`, `eval`), a random generator of the script's own",
    DENSE: f"an optimizer that steps, or gradients that are put to zero, by {COUNTS} (accumulation, skipped steps); a"
    " rate that the loop sets itself; parameters that it changes itself",
    OPTIMIZERS: f"a learning rate or another hyperparameter that follows {COUNTS}, or a scheduler that is not attached",
    BUFFERS: "forwards that happen in one run and not in the other, say evaluations by a count of the loop's own",
    ATTACHED: "its state follows from something that is not attached, or its `load_state_dict` does not bring all of"
    " `state_dict` back",
}
REMEDY = (
    "Attach what the loop keeps for itself (anything with `state_dict` and `load_state_dict`), or let it follow from"
    " `batches.drawn`, `batches.epoch` and `model.steps_done`."
)


@dataclass(frozen=True)
class Life:
    """The record of one trainer from one start on.

    Attributes:
        resumed: the step that it went on after; None: it began.
        trained, kept: step -> values.
        epochs: step -> the pass of the batch after it, where that is known.
        held: the step after which it waited to be killed.
        ended: values when the model was closed.
        warned: of what the library has warned, in its order.
        script: digest of the script that ran.
    """

    pid: int
    number: int
    resumed: int | None = None
    trained: Mapping[int, Values] = field(default_factory=dict)
    kept: Mapping[int, Values] = field(default_factory=dict)
    epochs: Mapping[int, int] = field(default_factory=dict)
    held: int | None = None
    ended: Values | None = None
    warned: tuple[str, ...] = ()
    script: str = ""


@dataclass(frozen=True)
class Trace:
    """All lives of one trainer, in order."""

    lives: tuple[Life, ...]

    @property
    def steps(self) -> int:
        """The last step that was trained; 0 if none was."""
        return max((max(life.trained, default=0) for life in self.lives), default=0)


@dataclass(frozen=True)
class Difference:
    """The first difference between two runs. `names`: the values that differ, each behind what it follows from."""

    step: int
    trainer: int
    names: tuple[str, ...]
    life: int = 0
    resumed: int | None = None


@dataclass(frozen=True)
class Verdict:
    """The result of a rehearsal. `text`: its lines; the first begins with the result, in capitals."""

    equal: bool
    text: str


# reading ------------------------------------------------------------------------------------------


def _life_of(records: Sequence[Record]) -> tuple[int, Life]:
    begun = records[0]
    if not isinstance(begun, Begun):
        raise ValueError(f"a file of records must begin with `begun`, got {begun!r}")
    trained = {r.step: r.values for r in records if isinstance(r, Trained)}
    kept = [r for r in records if isinstance(r, Kept)]
    return begun.trainer, Life(
        begun.pid,
        begun.life,
        next((r.step for r in records if isinstance(r, Resumed)), None),
        trained,
        {r.step: r.values for r in kept},
        {r.step: r.epoch for r in kept if r.epoch is not None},
        next((r.step for r in records if isinstance(r, Held)), None),
        next((r.values for r in records if isinstance(r, Ended)), None),
        tuple(r.text for r in records if isinstance(r, Warned)),
        begun.script,
    )


def traces(files: Iterable[Sequence[Record]]) -> dict[int, Trace]:
    """Groups the records of files by trainer, ascending.

    Raises:
        ValueError: a file does not begin as it must; or a trainer has two of the same life: two models in a process.
    """
    found: dict[int, list[Life]] = {}
    for records in files:
        trainer, life = _life_of(records)
        if any(other.number == life.number for other in found.get(trainer, [])):
            raise ValueError(
                f"trainer {trainer} has noted the steps of two models: a rehearsal is of one"
                " `torch_ecrec.DistributedModelParallel` for each start of the script"
            )
        found.setdefault(trainer, []).append(life)
    return {t: Trace(tuple(sorted(found[t], key=lambda life: life.number))) for t in sorted(found)}


# comparing ----------------------------------------------------------------------------------------


def _names(mine: Values | None, other: Values | None, left_out: frozenset[str]) -> tuple[str, ...]:
    """Returns the names of values that both have and that differ."""
    if mine is None or other is None:
        return ()
    names = [name for name in {**mine, **other} if name not in left_out and mine.get(name) != other.get(name)]
    return tuple(sorted(names, key=lambda name: (ORDER.index(name) if name in ORDER else len(ORDER), name)))


def difference(
    calm: Mapping[int, Trace],
    other: Mapping[int, Trace],
    steps: int | None = None,
    left_out: frozenset[str] = frozenset(),
) -> Difference | None:
    """Returns the first step at which a run differs from the undisturbed one: by life, then step, then trainer.

    Args:
        calm: the undisturbed run: one life each.
        other: another run.
        steps: the last one that is compared; None: all.
        left_out: names of values that do not count.
    """
    found: list[tuple[tuple[int, int, int, int], Difference]] = []
    for trainer, trace in other.items():
        expected = calm[trainer].lives[0]
        last = min(trace.steps, (expected.trained and max(expected.trained)) or 0, steps or trace.steps)
        for at, life in enumerate(trace.lives):
            for step in range(1, last + 1):
                for kind, mine, theirs in (
                    (0, expected.trained.get(step), life.trained.get(step)),
                    (1, expected.kept.get(step), life.kept.get(step)),
                ):
                    if names := _names(mine, theirs, left_out):
                        where = Difference(step, trainer, names, at, life.resumed)
                        found.append(((at, step, kind, trainer), where))
        life = trace.lives[-1]
        if steps is None and trace.steps == calm[trainer].steps and (n := _names(expected.ended, life.ended, left_out)):
            at = len(trace.lives) - 1
            found.append(((at, last, 2, trainer), Difference(last, trainer, n, at, life.resumed)))
    return min(found, key=lambda one: one[0])[1] if found else None


def never_made(trace: Trace, last: int) -> list[int]:
    """Returns the steps up to `last` that no life has trained."""
    made = {step for life in trace.lives for step in life.trained}
    return [step for step in range(1, last + 1) if step not in made]


def restless(calm: Mapping[int, Trace], again: Mapping[int, Trace]) -> frozenset[str]:
    """Returns the names of attached state that differs between two undisturbed runs."""
    found: set[str] = set()
    for trainer, trace in again.items():
        expected, life = calm[trainer].lives[0], trace.lives[0]
        for step, values in life.kept.items():
            found.update(n for n in _names(expected.kept.get(step), values, frozenset()) if n.startswith(ATTACHED))
    return frozenset(found)


# moments ------------------------------------------------------------------------------------------


def pass_ends(trace: Trace) -> list[int]:
    """Returns the last steps of the passes over the reader, as far as a run's first life tells them."""
    epochs = trace.lives[0].epochs
    steps = sorted(epochs)
    return [b for a, b in itertools.pairwise(steps) if epochs[b] > epochs[a]]


def moments(steps: int, ends: Sequence[int], number: int) -> list[int]:
    """Chooses steps at which trainers are killed: at a pass's end, in the step after it, and spread over a run.

    A trainer that is killed in the last step of a pass makes it again, with what the loop does after the pass; one
    that is killed in the step after it begins with the next pass.

    Args:
        steps: of the run, at least 1.
        ends: last steps of passes.
        number: how many are wanted; there are fewer in a short run.
    """
    ends, number = [end for end in ends if end <= steps], min(number, steps)
    first = min(ends[0] if ends else max(2, steps // (number + 1)), steps)
    spread = [round(i * steps / (number + 1)) for i in range(number, 0, -1)]
    chosen = dict.fromkeys([first, first + 1, *spread, *range(steps, 0, -1)])
    return sorted([step for step in chosen if 1 <= step <= steps][:number])


# verdicts -----------------------------------------------------------------------------------------


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _cause(name: str) -> str:
    return CAUSES.get(name) or CAUSES[ATTACHED if name.startswith(ATTACHED) else RATES]


def equal(steps: int, trainers: int, killed: Sequence[int], left_out: Iterable[str] = ()) -> Verdict:
    """Returns the verdict that nothing differs."""
    restarts = f"{len(killed)} restart{'s' * (len(killed) != 1)}"
    lines = [
        f"EQUAL: {steps} steps of {trainers} trainer{'s' * (trainers != 1)}, {restarts}"
        f" (killed in step{'s' * (len(killed) != 1)} {', '.join(map(str, killed))})"
    ]
    if left_out:
        lines.append(f"Not compared, since two undisturbed runs differ there, too: {', '.join(sorted(left_out))}.")
    return Verdict(True, "\n".join(lines))


def different(found: Difference) -> Verdict:
    """Returns the verdict that a step after a kill differs from the undisturbed one."""
    after = "restarted from its beginning" if not found.resumed else f"restarted after step {found.resumed}"
    return Verdict(
        False,
        f"DIFFERENT at step {found.step} of trainer {found.trainer}, {after}: {_listed(found.names)}\n"
        f"What usually causes it: {_cause(found.names[0])}.\n{REMEDY}",
    )


def prints_otherwise(odd: str) -> Verdict:
    """Returns the verdict that all steps are equal, but not what the script prints or saves."""
    return Verdict(
        False,
        f"DIFFERENT in what the script prints or saves, though no step is: {odd}\n"
        "What usually causes it: something that the script keeps for itself, beside what the model trains: an average"
        f" of its weights, a calibration of its scores, a metric or a count that adds up over steps.\n{REMEDY}",
    )


def with_warnings(found: Verdict, runs: Mapping[str, Iterable[str]]) -> Verdict:
    """Returns the verdict followed by every warning of the runs that it judges, each once, by run."""
    lines = [f"  {run}: {text}" for run, texts in runs.items() for text in dict.fromkeys(texts)]
    if not lines:
        return found
    head = "The runs that were judged have warned, which is to be read with that:"
    return Verdict(found.equal, "\n".join([found.text, head, *lines]))


def not_deterministic(found: Difference) -> Verdict:
    """Returns the verdict that two undisturbed runs differ, so that nothing can be said of restarts."""
    return Verdict(
        False,
        "NOT DETERMINISTIC: the script itself is not: two undisturbed runs differ at step"
        f" {found.step} of trainer {found.trainer} ({_listed(found.names)})\n"
        "Seed it: Python, NumPy, torch and every generator of its own, before the model is made; and keep clocks, the"
        " order of sets and files, and what a run before has left behind out of training.",
    )


def another_length(trainer: int, calm: int, other: int) -> Verdict:
    """Returns the verdict that the script trained more or fewer steps than undisturbed."""
    more = "more" if other > calm else "fewer"
    return Verdict(
        False,
        f"DIFFERENT: trainer {trainer} trains {more} steps when it is restarted: {other}, undisturbed {calm}\n"
        "What usually causes it: a loop that counts by itself (`range`, `enumerate`), or stops by a value of its own"
        f" (early stopping).\n{REMEDY}",
    )


def steps_left_out(trainer: int, steps: Sequence[int]) -> Verdict:
    """Returns the verdict that the undisturbed run made steps which no life of the other run made."""
    shown = ", ".join(map(str, steps[:10])) + (" ..." if len(steps) > 10 else "")
    return Verdict(False, f"DIFFERENT: trainer {trainer} has left out steps when it was restarted: {shown}")


def verdict(
    calm: Mapping[int, Trace],
    other: Mapping[int, Trace],
    killed: Sequence[int],
    steps: int | None,
    left_out: frozenset[str] = frozenset(),
) -> Verdict:
    """Returns the verdict on a disturbed run.

    Args:
        calm, other: the undisturbed run, and this one; both have come to their end.
        killed: the steps in which all trainers were killed.
        steps: the last one that counts; None: all.
        left_out: names of values that do not count.
    """
    if (found := difference(calm, other, steps, left_out)) is not None:
        return different(found) if found.life else not_deterministic(found)
    most = 0
    for trainer, trace in calm.items():
        expected, made = trace.steps, other[trainer].steps if trainer in other else 0
        if steps is not None:
            expected, made = min(expected, steps), min(made, steps)
        if expected != made:
            return another_length(trainer, expected, made)
        if gaps := never_made(other[trainer], made):
            return steps_left_out(trainer, gaps)
        most = max(most, made)
    return equal(most, len(calm), killed, left_out)
