"""What an import has to know besides the tensors: the job, and what a model calls its tables.

A checkpoint of a cluster is of a job: which optimizer steps which table, seed, trainers. Tensors that TorchRec has
saved do not say that; the script does. `torch_ecrec.checkpoint.describe` writes it to a small file of JSON, and what
this program exports has it with it.

Also here: which tensor is which field of which table.

    torchrec   model.sparse.embedding_bags.a.weight    optimizer.state.sparse.embedding_bags.a.weight.a.momentum1
    exported   a.weight                                a.momentum1

In the first form the words before the table's key (`model.`, `optimizer.state.`) are the script's, as it has saved
{"model": ...}; they are found by looking.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
from msgspec import Struct

from torch_ecrec.errors import CheckpointError
from torch_ecrec.records.schema import WEIGHT
from torch_ecrec.spec.job import JobSpec

FORMAT = 1
_TABLE = re.compile(r"(^|\.)(embedding_bags|embeddings)\.[^.]+\.")  # in the key of whatever belongs to a table
_SHOWN = 6  # names in a message

Place = tuple[str, str]  # a table's name in the job, a field of its records


@dataclass(frozen=True)
class Description:
    """Describes the job that tables are imported for, and what a model calls its tables.

    Args:
        job: tables, optimizers, trainers, seed, code.
        tables: name in the job -> key of the weights in the model's state dict, name in its module. Empty: not known.
        elsewhere: paths of modules whose tables TorchRec keeps, sharded: the script loads them.
        replicated: paths of modules whose tables are dense parameters.
        beside: paths of modules that keep something beside their tables (which id has which row): the script loads it.
        again: other paths of modules that the model has under several, with the same tables.
        inexact: why what lies beside it is not what an undisturbed run would have trained.
    """

    job: JobSpec
    tables: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    elsewhere: tuple[str, ...] = ()
    replicated: tuple[str, ...] = ()
    beside: tuple[str, ...] = ()
    again: tuple[str, ...] = ()
    inexact: tuple[str, ...] = ()

    def encoded(self) -> bytes:
        """Returns the description as bytes of JSON."""
        said = _File(
            FORMAT,
            self.job.to_json(),
            {job_name: list(names) for job_name, names in self.tables.items()},
            list(self.elsewhere),
            list(self.replicated),
            list(self.beside),
            list(self.again),
            list(self.inexact),
        )
        return msgspec.json.encode(said)

    @staticmethod
    def decoded(data: bytes, name: str) -> Description:
        """Returns the description of which `encoded` gave these bytes.

        Args:
            name: where it comes from, for errors.

        Raises:
            CheckpointError: it is none, or of a newer format.
        """
        try:
            version = msgspec.json.decode(data, type=_Version).format
            if version != FORMAT:
                raise CheckpointError(
                    f"{name} has format {version}, this program reads format {FORMAT}: describe the model again"
                )
            said = msgspec.json.decode(data, type=_File)
            job = JobSpec.from_json(said.job)
            names = {table.name for table in job.tables}
            if said.tables and said.tables.keys() != names:
                raise ValueError(f"it names tables {sorted(said.tables)}, the job has {sorted(names)}")
            tables = {job_name: (key, own) for job_name, (key, own) in said.tables.items()}
        except (msgspec.MsgspecError, UnicodeDecodeError, ValueError, TypeError, KeyError) as error:
            raise CheckpointError(
                f"{name} describes no job ({error}): `torch_ecrec.checkpoint.describe` writes such a file"
            ) from error
        others = (tuple(paths) for paths in (said.elsewhere, said.replicated, said.beside, said.again, said.inexact))
        return Description(job, tables, *others)


class _Version(Struct):
    """The version of a description, which any format of it has."""

    format: int


class _File(Struct, forbid_unknown_fields=True, omit_defaults=True):
    format: int
    job: dict[str, Any]
    tables: dict[str, list[str]]
    elsewhere: list[str]
    replicated: list[str]
    beside: list[str]
    again: list[str] = []  # an earlier build takes a file without it
    inexact: list[str] = []  # likewise


@dataclass(frozen=True)
class Found:
    """Where the fields of all tables are among the tensors of a source.

    Attributes:
        names: of the tensor of each field.
        model: what comes before the keys of the model ("model."); None: tensors are called by the job's names.
        zero: fields that begin with zeros, since nobody has them.
    """

    names: Mapping[Place, str]
    model: str | None
    zero: tuple[Place, ...] = ()


def find(
    there: Collection[str], description: Description, where: str, model: str | None = None, fresh: bool = False
) -> Found:
    """Finds the tensors of all fields of all tables.

    Args:
        there: names of the source's tensors.
        where: the source, for errors.
        model: what the model was saved as, "model" say; None: the only name under which all tables are.
        fresh: optimizer state that is not there begins with zeros, as in a table that was never trained.

    Raises:
        CheckpointError: a table or its optimizer state is missing, or there are others; all are named.
    """
    there = set(there)
    weights: dict[Place, str] = {(table.name, WEIGHT): f"{table.name}.{WEIGHT}" for table in description.job.tables}
    before: str | None = None
    if model is not None or not there.issuperset(weights.values()):
        before = _before_keys(there, description, where, model)
        weights = {(name, WEIGHT): f"{before}{key}" for name, (key, _) in description.tables.items()}
    state, missing = {}, []
    ends = _by_end(there, description) if before is not None else {}
    for place in _state_of(description.job):
        name, of_field = place
        mine = [f"{name}.{of_field}"] if before is None else ends.get(place, [])
        found = [one for one in mine if one in there]
        if len(found) > 1:
            raise CheckpointError(f"{where} has several tensors of `{of_field}` of table {name}: {_listed(found)}")
        if found:
            state[place] = found[0]
        else:
            missing.append(place)
    if missing and not fresh:
        raise CheckpointError(
            f"{where} lacks optimizer state: {_listed([f'`{one}` of table {name}' for name, one in missing])}. Save the"
            " tables' optimizer with the model, describe the model with the optimizer that it was trained with, or say"
            " --fresh-optimizer-state, to begin with zeros"
        )
    names = {**weights, **state}
    _check_others(there, names, before, description, where, fresh)
    return Found(names, before, tuple(missing))


def _state_of(job: JobSpec) -> Iterator[Place]:
    for table_group in job.table_groups:
        for table in table_group.tables:
            for of_field in table_group.schema.state:
                yield table.name, of_field.name


def _before_keys(there: set[str], description: Description, where: str, model: str | None) -> str:
    """Returns the one prefix with which all of the model's keys are there."""
    if not description.tables:
        lacks = [f"{table.name}.{WEIGHT}" for table in description.job.tables]
        raise CheckpointError(
            f"{where} has no tensors {_listed([name for name in lacks if name not in there])}, and what the model calls"
            " its tables was not told: `torch_ecrec.checkpoint.describe` writes a file for --job"
        )
    keys = [key for key, _ in description.tables.values()]
    if model is not None:
        ways = {f"{model}." if model else ""}
    else:
        ways = {name.removesuffix(key) for key in keys for name in there if name == key or name.endswith(f".{key}")}
    lacking = {way: [f"{way}{key}" for key in keys if f"{way}{key}" not in there] for way in ways}
    whole = [way for way, lacks in lacking.items() if not lacks]
    if len(whole) > 1:
        raise CheckpointError(
            f"{where} has all tables more than once, under {_listed(sorted(whole))}: say which, --model-key NAME"
        )
    if not whole:
        lacks = min(lacking.values(), key=len, default=keys)
        raise CheckpointError(f"{where} lacks tables: {_listed(lacks)}; it is of another model, or a part of one")
    return whole[0]


def _by_end(there: set[str], description: Description) -> dict[Place, list[str]]:
    """Returns, for each field of optimizer state, the names that end as TorchRec's do."""
    ends = {
        f"{description.tables[name][0]}.{description.tables[name][1]}.{of_field}": (name, of_field)
        for name, of_field in _state_of(description.job)
    }
    lengths = {end.count(".") for end in ends}
    found: dict[Place, list[str]] = {}
    for name in there:
        words = name.split(".")
        for length in lengths:
            place = ends.get(".".join(words[-length - 1 :]))
            if place is not None:
                found.setdefault(place, []).append(name)
    return found


def _check_others(
    there: set[str],
    names: Mapping[Place, str],
    before: str | None,
    description: Description,
    where: str,
    fresh: bool,
) -> None:
    """Refuses tables that nobody has described, and state of described ones that their optimizers do not keep; but for
    state where that may begin anew."""
    taken = set(names.values())
    exempt = (*description.elsewhere, *description.replicated, *description.again)
    if before is None:
        others = sorted(there - taken)
    else:
        keys = [key for key, _ in description.tables.values()]
        model = sorted(
            name
            for name in there - taken
            if name.startswith(before) and _TABLE.search(name) and not is_below(name.removeprefix(before), exempt)
        )
        state = sorted(name for name in there - taken if any(f".{key}." in f".{name}" for key in keys))
        others = [*model, *(name for name in state if name not in model and not fresh)]
    if others:
        raise CheckpointError(
            f"{where} has what the job knows nothing of: {_listed(others)}. It is of a model with other tables, or"
            " other optimizers: describe that one"
        )


def is_below(key: str, paths: Collection[str]) -> bool:
    """Returns whether a key of a state dict is of a module at one of these paths, or below one."""
    return any(not path or key.startswith(f"{path}.") for path in paths)


def _listed(names: Collection[str]) -> str:
    shown = ", ".join(list(names)[:_SHOWN])
    return f"{shown} and {len(names) - _SHOWN} more" if len(names) > _SHOWN else shown
