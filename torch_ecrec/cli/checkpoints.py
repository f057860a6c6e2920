"""`torch-ecrec checkpoints`: lists, verifies, removes, exports and imports checkpoints at a URL."""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch_ecrec.demo.interrupts import sigterm_interrupts

if TYPE_CHECKING:  # numpy and Numba, which take a second
    from torch_ecrec.storage.catalog import Catalog
    from torch_ecrec.storage.listing import Listing
    from torch_ecrec.storage.manifest import Manifest
    from torch_ecrec.storage.saves import Saves

HELP = "list, verify, remove, export and import checkpoints at a URL"
OPTIONS_OF = {  # each says something of one of the actions
    "export": ("step", "format"),
    "import": ("job", "trainers", "seed", "model_key", "tables_only", "fresh_optimizer_state"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `checkpoints`."""
    parser.add_argument("url", metavar="URL", help="a folder, or any URL that fsspec knows: s3://bucket/folder")
    what = parser.add_mutually_exclusive_group()
    what.add_argument(
        "--verify", action="store_true", help="read all of every checkpoint; exit code 7 if one is faulty"
    )
    what.add_argument(
        "--remove", metavar="STEP|NAME", help="remove one, or what is left of one, unless others build on it"
    )
    what.add_argument(
        "--export",
        metavar="PATH",
        type=_here,
        help="write the newest, or that of --step, to this machine in another form (--format)",
    )
    what.add_argument(
        "--import",
        dest="source",
        metavar="PATH",
        type=_here,
        help="make a checkpoint of step 0 from a folder of torch.distributed.checkpoint, which TorchRec or --export has"
        " written, or from a file that ends in .safetensors",
    )
    parser.add_argument(
        "--format",
        choices=["safetensors", "dcp"],
        help="what --export writes: a file that ends in .safetensors (default), with weights and optimizer state of the"
        " tables; or a folder of torch.distributed.checkpoint, under TorchRec's names, with the dense model, too",
    )
    parser.add_argument("--step", metavar="STEP", type=int, help="step of the checkpoint to export")
    imports = parser.add_argument_group("of --import")
    imports.add_argument(
        "--job",
        metavar="FILE",
        type=Path,
        help="description of the model, from `torch_ecrec.checkpoint.describe`; what --export has written has its own",
    )
    imports.add_argument("--trainers", metavar="T", type=int, help="number of trainers, if not that of the job")
    imports.add_argument("--seed", metavar="N", type=int, help="seed of the model, if not that of the job")
    imports.add_argument(
        "--model-key", metavar="NAME", help="name under which the model was saved, if there are several: `model`, say"
    )
    imports.add_argument("--tables-only", action="store_true", default=None, help="leave the dense model to the script")
    imports.add_argument(
        "--fresh-optimizer-state",
        action="store_true",
        default=None,
        help="begin with zeros for tables whose optimizer state is missing, as if never trained",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def _here(text: str) -> Path:
    """Returns a path of this machine. Raises ArgumentTypeError for a URL: a folder here would get its name."""
    from torch_ecrec.storage.location import is_path

    if not text or not is_path(text):
        raise argparse.ArgumentTypeError(f"a path on this machine is wanted, got {text!r}")
    return Path(text)


def run(arguments: argparse.Namespace) -> int:
    """Runs the command; returns 7 if a checkpoint is faulty."""
    with sigterm_interrupts():  # what is half written would stay, hidden, and may be as large as all tables
        return _run(arguments)


def _run(arguments: argparse.Namespace) -> int:
    from torch_ecrec.errors import CheckpointError
    from torch_ecrec.storage.catalog import Catalog
    from torch_ecrec.storage.location import folder_of, require_place

    catalog = Catalog(arguments.url)
    require_place(arguments.url)
    if arguments.remove is not None:
        return _remove(catalog, arguments)
    done = {"export": arguments.export, "import": arguments.source}
    for action, options in OPTIONS_OF.items():
        for option in options:
            if getattr(arguments, option) is not None and done[action] is None:
                raise ValueError(f"--{option.replace('_', '-')} says what is {action}ed: it goes with --{action} PATH")
    if arguments.export is not None:
        return _export(catalog, arguments)
    if arguments.source is not None:
        return _import(catalog, arguments)
    if (folder := folder_of(arguments.url)) is not None and not folder.is_dir():
        raise CheckpointError(f"{arguments.url}: no such folder")
    found = _Found.look(catalog, arguments.verify)
    print(json.dumps(_as_json(found), indent=2) if arguments.json else _as_text(arguments.url, found, time.time()))
    wrong = found.listing.broken or found.saves.broken or any((found.faults or {}).values())
    return CheckpointError.exit_code if wrong else 0


@dataclass
class _Found:
    """The checkpoints and prioritised saves at a URL. `faults`: the faults of each, by name; None: not verified."""

    listing: Listing
    saves: Listing
    faults: dict[str, list[str]] | None
    removed: list[str] = field(default_factory=list)  # while they were read

    @staticmethod
    def look(catalog: Catalog, verify: bool) -> _Found:
        """Lists what is at the URL. With `verify`, it reads all of it."""
        from torch_ecrec.storage.saves import Saves

        saves = Saves(catalog.location)
        of_saves = saves.listing()  # first: of one that comes later the checkpoint would not be found
        found = _Found(catalog.listing(), of_saves, {} if verify else None)
        gone = {one.id for one in found.adrift() if not saves.folder(one.id).exists(one.file)}
        of_saves.whole = [one for one in of_saves.whole if one.id not in gone]
        if found.faults is not None:
            with _told_of(catalog, "verifies checkpoints", [*found.listing.whole, *found.saves.whole]):
                saves = Saves(catalog.location)  # which tells of its bytes, too
                found.faults.update((one.id, _faults(catalog, one)) for one in found.listing.whole)
                found.faults.update((f"saves/{one.id}", saves.faults(one)) for one in found.saves.whole)
            found.forget(catalog, saves)
        return found

    def forget(self, catalog: Catalog, saves: Saves) -> None:
        """Drops faulty ones that a running cluster has removed while they were read."""
        there = {one.id: catalog.folder(one.id).exists(one.file) for one in self.listing.whole}
        there |= {f"saves/{one.id}": saves.folder(one.id).exists(one.file) for one in self.saves.whole}
        assert self.faults is not None
        self.removed = [name for name, faults in self.faults.items() if faults and not there[name]]
        self.listing.whole = [one for one in self.listing.whole if one.id not in self.removed]
        self.saves.whole = [one for one in self.saves.whole if f"saves/{one.id}" not in self.removed]
        for name in self.removed:
            del self.faults[name]

    @functools.cached_property
    def steps(self) -> dict[str, str]:
        """Returns the steps of each checkpoint, by name."""
        return {one.id: str(one.done) for one in self.listing.whole}

    def saves_on(self, name: str) -> list[Manifest]:
        """Returns the prioritised saves on a checkpoint."""
        return [one for one in self.saves.whole if one.base == name]

    def adrift(self) -> list[Manifest]:
        """Returns the prioritised saves whose checkpoint is gone: nothing can use them."""
        there = {*(one.id for one in self.listing.whole), *(one.folder for one in self.listing.broken)}
        return [one for one in self.saves.whole if one.base not in there]


@contextlib.contextmanager
def _told_of(catalog: Catalog, what: str, manifests: Sequence[Manifest] = (), more: int = 0) -> Iterator[None]:
    """Says how far it is, and how long it still takes, while bytes are read or written at a catalog's place.

    `manifests`: of checkpoints that are read, with all that they build on; `more`: bytes besides.
    """
    from torch_ecrec.errors import CheckpointError
    from torch_ecrec.observe.progress import Progress
    from torch_ecrec.observe.words import size

    total = more
    for one in manifests:
        chain = [one]
        with contextlib.suppress(CheckpointError):  # of one that is faulty
            chain = catalog.chain(one) if one.kind != "save" else chain
        total += sum(each.bytes for each in chain)
    with Progress(what, total, size) as progress:
        catalog.location.on_bytes = progress.add
        yield


def _remove(catalog: Catalog, arguments: argparse.Namespace) -> int:
    """Removes a checkpoint, and the prioritised saves on it, which nothing could use."""
    from torch_ecrec.storage.saves import Saves

    name = _named(catalog, arguments.remove)
    catalog.remove(name)
    saves = Saves(catalog.location)
    gone = [name, *(f"saves/{one}" for one in saves.remove_on(name))]
    print(json.dumps({"removed": gone}) if arguments.json else "\n".join(f"removed {one}" for one in gone))
    if saves.elsewhere and not arguments.json:
        print("saves is a link: what lies there stays")
    return 0


def _named(catalog: Catalog, wanted: str) -> str:
    """Returns the name of the checkpoint to remove.

    Raises CheckpointError if there is none, or several have that step: another run's may be among them.
    """
    from torch_ecrec.errors import CheckpointError

    if not wanted.isdecimal():
        return wanted
    name = catalog.at(int(wanted)).id
    alike = [one.id for one in catalog.checkpoints() if one.done == int(wanted)]
    if len(alike) > 1:
        raise CheckpointError(
            f"{len(alike)} checkpoints at {catalog.url} are of step {wanted}, name one: {', '.join(alike)}"
        )
    return name


def _export(catalog: Catalog, arguments: argparse.Namespace) -> int:
    manifest = catalog.newest() if arguments.step is None else catalog.at(arguments.step)
    what = "the tables"
    absent: tuple[str, ...] = ("the dense model, which `--format dcp` writes",)
    with _told_of(catalog, f"exports step {manifest.done}", [manifest]), _unless_removed(catalog, manifest):
        if arguments.format == "dcp":
            from torch_ecrec.checkpoint import dcp_export

            written = dcp_export.export(catalog, manifest, arguments.export)
            size, what, absent = written.bytes, "tables and dense model", written.absent
        else:
            from torch_ecrec.storage import exporting

            size = exporting.export(catalog, manifest, arguments.export)
        inexact = catalog.inexact(manifest)
    said = {"exported": str(arguments.export), "name": manifest.id, "step": manifest.done, "bytes": size}
    if arguments.json:
        notes = [{"step": step, "what": what} for step, what in inexact]
        print(json.dumps({**said, "absent": list(absent), "inexact": notes}))
    else:
        print(f"{arguments.export}: {what} of step {manifest.done}, {size:,} bytes")
        print("\n".join(f"  not in it: {one}" for one in absent))
        for step, why in inexact:
            print(f"  NOT EXACT from step {step} on: {why}")
    return 0


@contextlib.contextmanager
def _unless_removed(catalog: Catalog, manifest: Manifest) -> Iterator[None]:
    """Says so where a checkpoint cannot be read since the cluster that writes there has removed it meanwhile."""
    from torch_ecrec.errors import CheckpointError

    try:
        yield
    except CheckpointError as error:
        if catalog.folder(manifest.id).exists(manifest.file):
            raise
        raise CheckpointError(
            f"{manifest.id} was removed while it was read: a cluster that writes to {catalog.url} keeps its newest ones"
            " only. Export again, and have it keep more if need be (--checkpoint-keep)"
        ) from error


def _import(catalog: Catalog, arguments: argparse.Namespace) -> int:
    from torch_ecrec.checkpoint import dcp_import

    wanted = dcp_import.Wanted(
        arguments.job,
        arguments.trainers,
        arguments.seed,
        arguments.model_key,
        bool(arguments.tables_only),
        bool(arguments.fresh_optimizer_state),
    )
    with _told_of(catalog, f"imports {arguments.source}", more=_bytes_of(arguments.source)):
        done = dcp_import.import_(catalog, arguments.source, wanted)
    manifest = done.manifest
    said = {"imported": str(arguments.source), "name": manifest.id, "step": manifest.done, "bytes": manifest.bytes}
    if arguments.json:
        print(json.dumps({**said, "rows": manifest.rows, "absent": list(done.absent)}))
    else:
        print(f"{manifest.id}: {manifest.rows:,} rows of {arguments.source}, {manifest.bytes:,} bytes")
        print("\n".join(f"  not in it: {one}" for one in done.absent))
        print(f"  train on from it: torch-ecrec up --restore {arguments.url}@0, for {manifest.spec.trainers} trainers")
    return 0


def _bytes_of(path: Path) -> int:
    """Returns the bytes of a file, or of all in a folder: about what an import of it writes."""
    files = [path] if path.is_file() else [one for one in path.rglob("*") if one.is_file()]
    return sum(one.stat().st_size for one in files)


def _faults(catalog: Catalog, manifest: Manifest) -> list[str]:
    """Returns the faults of a checkpoint and of what it builds on: of every file, or of the rows of all together."""
    from torch_ecrec.errors import CheckpointError
    from torch_ecrec.storage.chain_reader import check_rows

    try:
        check_rows(catalog, manifest)
    except CheckpointError as first:
        try:
            return [checked.fault for checked in catalog.verify(manifest) if checked.fault] or [str(first)]
        except CheckpointError as error:
            return [str(error)]
    return []


def _as_json(found: _Found) -> dict[str, Any]:
    def faults(name: str) -> dict[str, Any]:
        return {} if found.faults is None else {"faults": found.faults[name]}

    def broken(listing: Listing) -> list[dict[str, str]]:
        return [{"name": one.folder, "reason": one.reason} for one in listing.broken]

    def save(one: Manifest) -> dict[str, Any]:
        said = {"name": one.id, "step": one.done, "base": one.base, "bytes": one.bytes, "rows": one.rows}
        return {**said, "written_s": one.written_s, **faults(f"saves/{one.id}")}

    checkpoints = []
    for one in found.listing.whole:
        errors = {name: {"largest": error.largest, "rms": error.rms} for name, error in one.errors.items()}
        checkpoints.append(
            {
                "name": one.id,
                "step": one.done,
                "kind": one.kind,
                "base": one.base,
                "bytes": one.bytes,
                "rows": one.rows,
                "bits": one.encoding.bits,
                "zstd": one.encoding.zstd,
                "written_s": one.written_s,
                "version": one.version,
                "inexact": [{"step": step, "what": what} for step, what in one.inexact],
                "errors": errors,
                "saves": [save(each) for each in found.saves_on(one.id)],
                **faults(one.id),
            }
        )
    known = {each.id for one in found.listing.whole for each in found.saves_on(one.id)}
    return {
        "checkpoints": checkpoints,
        "broken": broken(found.listing),
        "unfinished": found.listing.unfinished,
        "removed": found.removed,
        "other_saves": {
            "whole": [save(one) for one in found.saves.whole if one.id not in known],
            "broken": broken(found.saves),
            "unfinished": found.saves.unfinished,
        },
    }


def _as_text(url: str, found: _Found, now_s: float) -> str:
    from torch_ecrec.observe.words import table

    listing = found.listing
    lines = [f"{len(listing.whole)} checkpoints at {url}" if listing.whole else f"no checkpoints at {url}"]
    rows = [["step", "kind", "base", "size", "rows", "weights", "written", "age", "name"]]
    if found.faults is not None:
        rows[0].append("verified")
    for one in listing.whole:
        rows.append(_row(found, one, one.id, now_s))
        rows += [_row(found, save, f"saves/{save.id}", now_s) for save in found.saves_on(one.id)]
    lines += table(rows) if listing.whole else []
    for one in listing.whole:
        lines += [f"  step {one.done}: NOT EXACT from step {step} on: {what}" for step, what in one.inexact]
        for error in one.errors.values():
            lines.append(f"  step {one.done}, table {error.table}: weights off by {error.rms:.3g} (rms),")
            lines[-1] += f" {error.largest:.3g} at most"
    for name, reasons in (found.faults or {}).items():
        lines += [f"  FAULTY {name}: {reason}" for reason in reasons]
    lines += [f"  BROKEN {one.folder}: {one.reason}" for one in listing.broken]
    lines += [f"  BROKEN saves/{one.folder}: {one.reason}" for one in found.saves.broken]
    lines += [f"  saves/{one.id} is on {one.base}, which is not there: nothing can use it" for one in found.adrift()]
    lines += [f"  {name} was removed while it was read" for name in found.removed]
    unfinished = [*listing.unfinished, *(f"saves/{name}" for name in found.saves.unfinished)]
    if unfinished:
        lines.append(f"  without a manifest, under way or left of interrupted ones: {', '.join(unfinished)}")
    if listing.unfinished:
        lines.append("  where nothing writes any more, --remove NAME removes what is left of one")
    return "\n".join(lines)


def _row(found: _Found, one: Manifest, name: str, now_s: float) -> list[str]:
    """Returns a row of the table: a checkpoint, or a prioritised save on one."""
    from torch_ecrec.observe.words import size

    base = "-" if one.base is None else found.steps.get(one.base, f"{one.base} (not there)")
    weights = f"{one.encoding.bits} bits" if one.encoding.bits else "exact"
    written = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(one.written_s))
    row = [str(one.done), one.kind, base, size(one.bytes), f"{one.rows:,}", weights, written]
    row += [_age(now_s - one.written_s), name]
    if found.faults is not None:
        row.append(f"FAULTY ({len(found.faults[name])})" if found.faults[name] else "whole")
    return row


def _age(span_s: float) -> str:
    """Returns an age as people read it: 42 s, 7 min, 3 h, 12 d."""
    for unit, unit_s, following_s in (("s", 1, 120), ("min", 60, 7200), ("h", 3600, 172800)):
        if span_s < following_s:
            return f"{max(span_s, 0) / unit_s:.0f} {unit}"
    return f"{span_s / 86400:.0f} d"
