"""`torch-ecrec checkpoints`: what is kept at a URL, whether it can be read; removing one, exporting and importing."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # numpy and Numba, which take a second
    from torch_ecrec.storage.catalog import Catalog, Listing
    from torch_ecrec.storage.manifest import Manifest

HELP = "list, verify, remove, export and import checkpoints at a URL"
OPTIONS_OF = {  # each says something of one of the actions
    "export": ("step", "format"),
    "import": ("job", "trainers", "seed", "model_key", "tables_only", "fresh_optimizer_state"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `checkpoints`."""
    parser.add_argument("url", metavar="URL", help="a folder, or any URL that fsspec knows: s3://bucket/folder")
    what = parser.add_mutually_exclusive_group()
    what.add_argument(
        "--verify", action="store_true", help="read all of every checkpoint; exit code 7 if one is faulty"
    )
    what.add_argument("--remove", metavar="STEP", type=int, help="remove that one; not what others build on")
    what.add_argument(
        "--export",
        metavar="PATH",
        type=Path,
        help="write it to this machine in another form (--format); the newest, or that of --step",
    )
    what.add_argument(
        "--import",
        dest="source",
        metavar="PATH",
        type=Path,
        help="make a checkpoint of step 0 of a folder of torch.distributed.checkpoint, which TorchRec or --export has"
        " written, or of a file that ends in .safetensors",
    )
    parser.add_argument(
        "--format",
        choices=["safetensors", "dcp"],
        help="of --export: a file that ends in .safetensors (default), with the tables, weights and optimizer state; or"
        " a folder of torch.distributed.checkpoint, under TorchRec's names, with the dense model and its optimizers",
    )
    parser.add_argument("--step", metavar="STEP", type=int, help="which one --export is of")
    imports = parser.add_argument_group("of --import")
    imports.add_argument(
        "--job",
        metavar="FILE",
        type=Path,
        help="of which model: written by `torch_ecrec.checkpoint.describe`; what --export has written says it itself",
    )
    imports.add_argument("--trainers", metavar="T", type=int, help="that will train on, if not as many as in the job")
    imports.add_argument("--seed", metavar="N", type=int, help="of the script's model, if another than in the job")
    imports.add_argument(
        "--model-key", metavar="NAME", help="what the model was saved as, if there are several: `model`, say"
    )
    imports.add_argument(
        "--tables-only", action="store_true", default=None, help="the script loads the dense model, before `attach`"
    )
    imports.add_argument(
        "--fresh-optimizer-state",
        action="store_true",
        default=None,
        help="tables whose optimizer state is not there begin with zeros, as if never trained",
    )
    parser.add_argument("--json", action="store_true")


def run(arguments: argparse.Namespace) -> int:
    """Does what the arguments say; 7 if something is wrong with a checkpoint that is there."""
    from torch_ecrec.errors import CheckpointError
    from torch_ecrec.storage.catalog import Catalog

    catalog = Catalog(arguments.url)
    if arguments.remove is not None:
        name = catalog.at(arguments.remove).id
        catalog.remove(name)
        print(json.dumps({"removed": [name]}) if arguments.json else f"removed {name}")
        return 0
    done = {"export": arguments.export, "import": arguments.source}
    for action, options in OPTIONS_OF.items():
        for option in options:
            if getattr(arguments, option) is not None and done[action] is None:
                raise ValueError(f"--{option.replace('_', '-')} says what is {action}ed: it goes with --{action} PATH")
    if arguments.export is not None:
        return _export(catalog, arguments)
    if arguments.source is not None:
        return _import(catalog, arguments)
    listing = catalog.listing()
    faults = {one.id: _faults(catalog, one) for one in listing.whole} if arguments.verify else {}
    if arguments.json:
        print(json.dumps(_as_json(listing, faults if arguments.verify else None), indent=2))
    else:
        print(_as_text(arguments.url, listing, faults if arguments.verify else None, time.time()))
    return CheckpointError.exit_code if listing.broken or any(faults.values()) else 0


def _export(catalog: Catalog, arguments: argparse.Namespace) -> int:
    manifest = catalog.newest() if arguments.step is None else catalog.at(arguments.step)
    what = "the tables"
    absent: tuple[str, ...] = ("the dense model, which `--format dcp` writes",)
    if arguments.format == "dcp":
        from torch_ecrec.nn import dcp_export

        written = dcp_export.export(catalog, manifest, arguments.export)
        size, what, absent = written.bytes, "tables and dense model", written.absent
    else:
        from torch_ecrec.storage import exporting

        size = exporting.export(catalog, manifest, arguments.export)
    said = {"exported": str(arguments.export), "name": manifest.id, "step": manifest.done, "bytes": size}
    if arguments.json:
        print(json.dumps({**said, "absent": list(absent)}))
    else:
        print(f"{arguments.export}: {what} of step {manifest.done}, {size:,} bytes")
        print("\n".join(f"  not in it: {one}" for one in absent))
    return 0


def _import(catalog: Catalog, arguments: argparse.Namespace) -> int:
    from torch_ecrec.nn import dcp_import

    wanted = dcp_import.Wanted(
        arguments.job,
        arguments.trainers,
        arguments.seed,
        arguments.model_key,
        bool(arguments.tables_only),
        bool(arguments.fresh_optimizer_state),
    )
    done = dcp_import.import_(catalog, arguments.source, wanted)
    manifest = done.manifest
    said = {"imported": str(arguments.source), "name": manifest.id, "step": manifest.done, "bytes": manifest.bytes}
    if arguments.json:
        print(json.dumps({**said, "rows": manifest.rows, "absent": list(done.absent)}))
    else:
        print(f"{manifest.id}: {manifest.rows:,} rows of {arguments.source}, {manifest.bytes:,} bytes")
        print("\n".join(f"  not in it: {one}" for one in done.absent))
        print(f"  train on from it: torch-ecrec up --restore {arguments.url}, for {manifest.spec.trainers} trainers")
    return 0


def _faults(catalog: Catalog, manifest: Manifest) -> list[str]:
    """What is wrong with a checkpoint and what it builds on: of every file; or of the rows of all together."""
    from torch_ecrec.errors import CheckpointError
    from torch_ecrec.storage.restoring import check_rows

    try:
        check_rows(catalog, manifest)
    except CheckpointError as first:
        try:
            return [checked.fault for checked in catalog.verify(manifest) if checked.fault] or [str(first)]
        except CheckpointError as error:
            return [str(error)]
    return []


def _as_json(listing: Listing, faults: dict[str, list[str]] | None) -> dict[str, Any]:
    checkpoints = []
    for one in listing.whole:
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
                "errors": errors,
                **({} if faults is None else {"faults": faults[one.id]}),
            }
        )
    broken = [{"name": one.folder, "reason": one.reason} for one in listing.broken]
    return {"checkpoints": checkpoints, "broken": broken, "unfinished": listing.unfinished}


def _as_text(url: str, listing: Listing, faults: dict[str, list[str]] | None, now_s: float) -> str:
    from torch_ecrec.observe.text import size, table

    lines = [f"{len(listing.whole)} checkpoints at {url}" if listing.whole else f"no checkpoints at {url}"]
    steps = {one.id: str(one.done) for one in listing.whole}
    rows = [["step", "kind", "base", "size", "rows", "weights", "written", "age", "name"]]
    if faults is not None:
        rows[0].append("verified")
    for one in listing.whole:
        base = "-" if one.base is None else steps.get(one.base, f"{one.base} (not there)")
        weights = f"{one.encoding.bits} bits" if one.encoding.bits else "exact"
        written = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(one.written_s))
        row = [str(one.done), one.kind, base, size(one.bytes), f"{one.rows:,}", weights, written]
        row += [_age(now_s - one.written_s), one.id]
        if faults is not None:
            row.append(f"FAULTY ({len(faults[one.id])})" if faults[one.id] else "whole")
        rows.append(row)
    lines += table(rows) if listing.whole else []
    for one in listing.whole:
        for error in one.errors.values():
            lines.append(f"  step {one.done}, table {error.table}: weights off by {error.rms:.3g} (rms),")
            lines[-1] += f" {error.largest:.3g} at most"
    for name, reasons in (faults or {}).items():
        lines += [f"  FAULTY {name}: {reason}" for reason in reasons]
    lines += [f"  BROKEN {one.folder}: {one.reason}" for one in listing.broken]
    if listing.unfinished:
        lines.append(f"  without a manifest, under way or left of interrupted ones: {', '.join(listing.unfinished)}")
    return "\n".join(lines)


def _age(span_s: float) -> str:
    """A time as people say it: 42 s, 7 min, 3 h, 12 d."""
    for unit, unit_s, following_s in (("s", 1, 120), ("min", 60, 7200), ("h", 3600, 172800)):
        if span_s < following_s:
            return f"{max(span_s, 0) / unit_s:.0f} {unit}"
    return f"{span_s / 86400:.0f} d"
