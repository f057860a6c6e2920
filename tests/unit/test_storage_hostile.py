"""A place of checkpoints and prioritised saves with what no writer has written there: nothing of it ends in a
traceback, hides what else is there, or harms what is somebody else's."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import xxhash
from kept import random_records
from test_checkpoint_files import JOB, Answer, asked_for, committed, manifests_of, order_of, write
from test_storage_saves import SOME, names_at, partial_restore, saved

from torch_ecrec.cli.main import main
from torch_ecrec.coordinator.checkpointing import Finished
from torch_ecrec.errors import CheckpointError
from torch_ecrec.processes import restore_source
from torch_ecrec.processes.part_reader import slot_records
from torch_ecrec.protocol.messages import Restored
from torch_ecrec.spec.job import JobSpec
from torch_ecrec.storage.catalog import Catalog
from torch_ecrec.storage.chain_reader import check_rows
from torch_ecrec.storage.location import Location
from torch_ecrec.storage.saves import Saves


def place(folder: Path) -> tuple[Any, Restored, str]:
    """A manifests, a checkpoint that it has written, and the name of a save on that."""
    url, records = str(folder), random_records(JOB, 3)
    manifests = manifests_of(url, **SOME)
    full = committed(manifests, url, 40, records)
    return manifests, full, saved(manifests, url, 50, records, full, 2)


def altered(**what: Any) -> Callable[[Path], None]:
    """Another manifest, whose hash is right."""

    def write(file: Path) -> None:
        said = json.loads(file.read_bytes())["manifest"]
        body = msgspec.json.encode(
            said | {key: value(said) if callable(value) else value for key, value in what.items()}
        )
        envelope = {"format": 1, "xxh3_128": xxhash.xxh3_128_hexdigest(body), "manifest": msgspec.Raw(body)}
        file.write_bytes(msgspec.json.encode(envelope))

    return write


def deep(file: Path) -> None:
    file.write_bytes(b'{"format":1,"xxh3_128":"a","manifest":' + b"[" * 200_000 + b"]" * 200_000 + b"}")


def huge(file: Path) -> None:
    file.unlink()
    with file.open("wb") as sparse:
        sparse.truncate(1 << 40)


def pipe(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def device(file: Path) -> None:
    file.unlink()
    file.symlink_to("/dev/zero")


def folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


def loop(file: Path) -> None:
    file.unlink()
    file.symlink_to(file.name)


def newer(file: Path) -> None:
    file.write_bytes(file.read_bytes().replace(b'"format":1', b'"format":3'))


HOSTILE = {
    "no job": (altered(job={"x": 1}), "`job` is none: KeyError"),
    "a job of something else": (altered(job={"tables": 5}), "`job` is none"),
    "a part twice": (altered(parts=lambda said: said["parts"][:1] * 2), "two parts have one name"),
    "another step": (altered(done=51), "its name says another step"),
    "deep": (deep, "was cut off or altered"),
    "huge": (huge, "has 1,099,511,627,776 bytes"),
    "a pipe": (pipe, "not a file"),
    "a device": (device, "not a file"),
    "a folder": (folder, "a folder, not a file"),
    "a loop of links": (loop, "symbolic links"),
    "a newer format": (newer, "has format 3, this program reads formats 1 and 2"),
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("what", HOSTILE)
def test_a_manifest_of_a_save_that_no_writer_has_written_is_named(
    what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, full, name = place(tmp_path)
    do, why = HOSTILE[what]
    do(tmp_path / "saves" / name / "save.json")
    for more in ([], ["--verify"], ["--json"]):
        assert main(["checkpoints", str(tmp_path), *more]) == CheckpointError.exit_code
        out = capsys.readouterr().out
        assert why in out and (more == ["--json"] or f"BROKEN saves/{name}" in out)
        assert full.folder in out, "the checkpoint is listed all the same"
    with pytest.raises(CheckpointError, match=why.replace("(", r"\(")):
        list(slot_records(partial_restore(full, name), JOB, 1))


@pytest.mark.timeout(60)
@pytest.mark.parametrize("do", [deep, huge, pipe, device, folder, loop, newer], ids=lambda do: do.__name__)
def test_so_is_one_of_a_checkpoint(do: Callable[[Path], None], tmp_path: Path) -> None:
    url, records = str(tmp_path), random_records(JOB, 3)
    first = committed(manifests_of(url), url, 40, records)
    second = committed(manifests_of(url), url, 80, records)
    do(tmp_path / second.folder / "manifest.json")
    assert main(["checkpoints", url]) == CheckpointError.exit_code
    listing = Catalog(url).listing()
    assert [one.id for one in listing.whole] == [first.folder] and [one.folder for one in listing.broken]
    catalog = Catalog(url)
    assert catalog.newest().id == first.folder, "what is no manifest, however often it is read, hides no checkpoint"
    committed(manifests_of(url), url, 120, records)
    assert catalog.keep(1) == [first.folder], "nor does it keep any"


def test_a_file_that_has_the_name_of_a_folder_hides_nothing_and_is_removed_like_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    manifests, full, name = place(tmp_path)
    strange, others = "000000000051-run-1-9", "000000000052-other-1-9"
    for at in (tmp_path, tmp_path / "saves"):
        (at / strange).write_text("a file")
        (at / others).write_text("a file")
    assert main(["checkpoints", str(tmp_path)]) == CheckpointError.exit_code
    out = capsys.readouterr().out
    assert out.count("a file is where a folder is wanted") == 4 and f"saves/{name}" in out and full.folder in out
    catalog = Catalog(str(tmp_path))
    assert catalog.newest().id == full.folder and catalog.keep(1) == [], "it is not as if it could be read later"
    manifests.end("run", 60.0)
    assert names_at(str(tmp_path)) == [others]


def test_copies_beside_the_originals_stop_nobody(tmp_path: Path) -> None:
    """A person keeps one under another name. The manifests's thread ended at that, and nothing counted any more."""
    manifests, full, name = place(tmp_path)
    copies = [tmp_path / f"{full.folder}-copy", tmp_path / "000000000040-run-1-x", tmp_path / "000000000040-run-1-4_0"]
    copies += [
        tmp_path / "000000000040-run-x",
        tmp_path / "saves" / f"{name}-copy",
        tmp_path / "saves" / "000000000050-run-x",
    ]
    for copy in copies:
        shutil.copytree(tmp_path / ("saves/" + name if copy.parent.name == "saves" else full.folder), copy)
    left = tmp_path / "000000000041-run-1-x"  # without a manifest
    left.mkdir()
    later = committed(manifests, str(tmp_path), 80, random_records(JOB, 4))
    asked_for(manifests)
    assert name not in names_at(str(tmp_path)), "it was on the checkpoint before"
    assert restore_source.newest_of("run", str(tmp_path))[0] == (later, JOB)
    manifests.end("run", 60.0)
    assert all(copy.exists() for copy in [*copies, left])


def test_of_a_link_nothing_but_the_link_is_removed(tmp_path: Path) -> None:
    _, full, name = place(tmp_path / "theirs")
    mine = tmp_path / "mine"
    (mine / "saves").mkdir(parents=True)
    (mine / full.folder).symlink_to(tmp_path / "theirs" / full.folder)
    (mine / "saves" / name).symlink_to(tmp_path / "theirs" / "saves" / name)
    assert main(["checkpoints", str(mine), "--remove", "40"]) == 0
    assert not (mine / full.folder).is_symlink() and not names_at(str(mine))
    assert main(["checkpoints", str(tmp_path / "theirs"), "--verify"]) == 0
    assert names_at(str(tmp_path / "theirs")) == [name] and Catalog(str(tmp_path / "theirs")).newest().id == full.folder


def test_saves_that_are_a_link_altogether_stay(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A folder that somebody has made of another's: his checkpoint goes, and none of the other's saves."""
    _, full, name = place(tmp_path / "theirs")
    mine = tmp_path / "mine"
    mine.mkdir()
    shutil.copytree(tmp_path / "theirs" / full.folder, mine / full.folder)
    (mine / "saves").symlink_to(tmp_path / "theirs" / "saves")
    assert main(["checkpoints", str(mine), "--remove", "40"]) == 0
    assert capsys.readouterr().out == f"removed {full.folder}\nsaves is a link: what lies there stays\n"
    assert [one.name for one in mine.iterdir()] == ["saves"] and names_at(str(tmp_path / "theirs")) == [name]


def test_of_two_runs_in_one_folder_the_one_that_is_named_is_removed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url, records = str(tmp_path), random_records(JOB, 3)
    order, answer = order_of(url, 40, run="other"), Answer()
    manifests_of(url).commit(Finished(order.folder, order.step, 40, "", write(url, order, records), 0), answer)
    assert answer.wait()[0] is None
    _, full, name = place(tmp_path)
    assert main(["checkpoints", url, "--remove", "40"]) == CheckpointError.exit_code
    assert f"2 checkpoints at {url} are of step 40, name one: {full.folder}, {order.folder}" in capsys.readouterr().err
    assert main(["checkpoints", url, "--remove", order.folder]) == 0
    assert capsys.readouterr().out == f"removed {order.folder}\n" and names_at(url) == [name]
    for wrong in (order.folder, "saves", "..", "-1", f"saves/{name}"):
        assert main(["checkpoints", url, f"--remove={wrong}"]) == CheckpointError.exit_code
    assert main(["checkpoints", url, "--remove", "40"]) == 0 and not names_at(url)


def test_what_is_removed_while_it_is_looked_at_is_no_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A cluster that runs removes saves all the time, and checkpoints."""
    _, full, name = place(tmp_path)
    faults = Saves.faults

    def removed_before(self: Saves, save: Any) -> list[str]:
        self.remove(save.id)
        return faults(self, save)

    with monkeypatch.context() as patch:
        patch.setattr(Saves, "faults", removed_before)
        assert main(["checkpoints", str(tmp_path), "--verify"]) == 0
    out = capsys.readouterr().out
    assert f"saves/{name} was removed while it was read" in out and "FAULTY" not in out and full.folder in out
    place(tmp_path / "again")
    exists = Location.exists

    def is_gone_then(self: Location, file: str) -> bool:
        found = exists(self, file)
        if found:
            (tmp_path / "again" / self.url.removeprefix(f"{tmp_path}/again/") / file).unlink()
        return found

    with monkeypatch.context() as patch:
        patch.setattr(Location, "exists", is_gone_then)
        listings = Saves(Location(str(tmp_path / "again"))).listing(), Catalog(str(tmp_path / "again")).listing()
    assert not any(listing.whole or listing.broken for listing in listings)


def test_a_folder_without_permission_is_named_and_the_rest_is_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Tests may run as root, who may do everything."""
    _, full, name = place(tmp_path)
    stat = os.stat

    def denied(path: Any, *rest: Any, **more: Any) -> Any:
        if f"saves/{name}/" in str(path):
            raise PermissionError(13, "Permission denied", str(path))
        return stat(path, *rest, **more)

    monkeypatch.setattr(os, "stat", denied)
    assert main(["checkpoints", str(tmp_path)]) == CheckpointError.exit_code
    out = capsys.readouterr().out
    assert f"BROKEN saves/{name}: cannot look for" in out and "give this user permission" in out and full.folder in out


@pytest.mark.parametrize("url", ["memory://run[1]", "memory://a/run?", "memory://*"])
def test_a_place_that_fsspec_takes_for_a_pattern_is_refused(url: str) -> None:
    """It would remove folders of other runs that the pattern fits."""
    with pytest.raises(CheckpointError, match="for a pattern, and would remove what else it fits; name a place"):
        Location(url)


def test_a_local_folder_may_have_such_a_name(tmp_path: Path) -> None:
    mine, other = Location(str(tmp_path / "run[1]")), Location(str(tmp_path / "run1"))
    for location in (mine, other):
        location.write_whole("saves/x", b"records")
    mine.remove("saves")
    assert other.read("saves/x") == b"records" and not mine.exists("saves")


@pytest.mark.parametrize("url", ["s4://x", "http://127.0.0.1:1/x", "abc::def://x", "/not/\x00there"])
def test_a_wrong_url_is_an_error_with_its_name(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoints", url]) == CheckpointError.exit_code
    assert url in capsys.readouterr().err


# --- a number is compared before anything of its size is made ---------------------------------------------------------


def numbers(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Where every whole number of a manifest is."""
    if isinstance(value, dict):
        return [found for key, inner in value.items() for found in numbers(inner, (*path, key))]
    if isinstance(value, list):
        return [found for key, inner in enumerate(value) for found in numbers(inner, (*path, key))]
    return [path] if isinstance(value, int) and not isinstance(value, bool) else []


def forge(value: Any, path: tuple[Any, ...], number: int) -> None:
    for key in path[:-1]:
        value = value[key]
    value[path[-1]] = number


@pytest.mark.timeout(600)
@pytest.mark.parametrize("zstd", [0, 3])
def test_no_number_of_a_manifest_has_whoever_lists_it_make_something_of_its_size(zstd: int, tmp_path: Path) -> None:
    """Every number, each of several sizes, with a right hash; all together in one process with little memory."""
    url, records = str(tmp_path / "place"), random_records(JOB, 3)
    order, answer = order_of(url, 40, **({"zstd": zstd} if zstd else {})), Answer()
    manifests = manifests_of(url, encoding=(("zstd", zstd),) if zstd else ())
    manifests.commit(Finished(order.folder, order.step, 40, "", write(url, order, records), 0), answer)
    assert answer.wait() == (None, True)
    source = Path(url) / order.folder
    said = json.loads((source / "manifest.json").read_bytes())["manifest"]
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    tried = 0
    resource.setrlimit(resource.RLIMIT_AS, (used + (256 << 20), hard))
    try:
        for path in numbers(said):
            for number in (10**9, 2**31 - 1, 2**47, 2**50, 2**53, 2**62):
                forged = json.loads(json.dumps(said))
                forge(forged, path, number)
                if path[-1] == "rows" and number < 2**48:  # the parts say so, too
                    for part in forged["parts"]:
                        part["rows"] = [number, *part["rows"][1:]] if part is forged["parts"][0] else part["rows"]
                altered(**forged)(source / "manifest.json")
                listing = Catalog(url).listing()
                assert len(listing.whole) + len(listing.broken) == 1
                for one in listing.whole:
                    with contextlib.suppress(CheckpointError):
                        check_rows(Catalog(url), one)
                tried += 1
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    assert tried > 100


@pytest.mark.parametrize("what", ["trainers", "slots", "rows", "dim"])
def test_a_job_has_numbers_that_some_job_can_have(what: str) -> None:
    """Descriptions, joins and manifests are read by the same words."""
    value = JOB.to_json()
    value = json.loads(json.dumps(value))
    forge(value, {"trainers": ("trainers",), "slots": ("code", "slots")}.get(what, ("tables", 0, what)), 2**50)
    with pytest.raises(ValueError, match="must be at most"):
        JobSpec.from_json(value)
