"""Files that are written past the page cache: every byte, whatever the file system can."""

import errno
import fcntl
import os
from pathlib import Path
from typing import Any

import pytest

from torch_ecrec.storage import direct
from torch_ecrec.storage.direct import DirectFile

SIZES = [0, 1, 4096, 10_000, 3 * 8192, 3 * 8192 + 17]


def written(path: Path, size: int, most: int) -> bytes:
    data = os.urandom(size)
    file = DirectFile(path)
    for first in range(0, size, most):
        file.write(memoryview(data)[first : first + most])
    file.sync()
    file.close()
    file.close()
    return data


@pytest.mark.parametrize("place", ["disk", "shm"])
@pytest.mark.parametrize("size", SIZES)
def test_every_byte(tmp_path: Path, place: str, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct, "BUFFER_BYTES", 8192)
    path = (tmp_path if place == "disk" else Path("/dev/shm")) / f"torch-ecrec-{os.getpid()}-{size}"
    try:
        for most in (1000, 8192, 20_000):
            assert written(path, size, most) == path.read_bytes()
            path.unlink()
    finally:
        path.unlink(missing_ok=True)


def test_a_file_system_that_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When it is asked, or when something is written; short writes, too."""
    monkeypatch.setattr(direct, "BUFFER_BYTES", 8192)
    control, write, refused = fcntl.fcntl, os.write, []

    def flags(handle: int, command: int, argument: int = 0) -> Any:
        if command == fcntl.F_SETFL and argument & os.O_DIRECT:
            refused.append("asked")
            raise OSError(errno.EINVAL, "not here")
        return control(handle, command, argument)

    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "fcntl", flags)
        assert written(tmp_path / "a", 20_000, 999) == (tmp_path / "a").read_bytes()
    assert refused == ["asked"]

    def write_some(handle: int, view: Any) -> int:
        if control(handle, fcntl.F_GETFL) & os.O_DIRECT:
            refused.append("written")
            raise OSError(errno.EINVAL, "not so")
        return write(handle, view[:777])

    monkeypatch.setattr(os, "write", write_some)
    assert written(tmp_path / "b", 20_000, 999) == (tmp_path / "b").read_bytes()
    assert len(refused) == 1 or refused[1:] == ["written"]


def test_what_is_there_stays_and_errors_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").write_text("mine")
    with pytest.raises(FileExistsError):
        DirectFile(tmp_path / "a")
    assert (tmp_path / "a").read_text() == "mine"

    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, "full")

    file = DirectFile(tmp_path / "b")
    monkeypatch.setattr(os, "write", full)
    file.write(memoryview(b"x"))
    with pytest.raises(OSError, match="full"):
        file.sync()
    file.close()


def test_nothing_is_written_once_it_is_closed(tmp_path: Path) -> None:
    """Its number may be another file's by then."""
    file = DirectFile(tmp_path / "a")
    file.write(memoryview(b"mine"))
    file.close()
    other = os.open(tmp_path / "b", os.O_RDWR | os.O_CREAT)
    try:
        for act in (lambda: file.write(memoryview(b"!")), file.sync):
            with pytest.raises(ValueError, match="closed"):
                act()
    finally:
        os.close(other)
    assert (tmp_path / "b").read_bytes() == b""


def test_nothing_is_written_after_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A part of the buffer may be in the file: written once more, it would be there twice."""
    monkeypatch.setattr(direct, "BUFFER_BYTES", 8192)
    write, calls = os.write, 0

    def full(handle: int, data: Any) -> int:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise OSError(errno.ENOSPC, "no space left")
        return write(handle, data[:4096])

    monkeypatch.setattr(os, "write", full)
    file = DirectFile(tmp_path / "a")
    with pytest.raises(OSError, match="no space left"):
        file.write(memoryview(bytes(8192)))
    for act in (lambda: file.write(memoryview(b"!")), file.sync):
        with pytest.raises(ValueError, match="failed"):
            act()
    file.close()
    assert (tmp_path / "a").stat().st_size == 4096 and calls == 2


def test_no_file_is_left_where_there_is_no_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: object, **__: object) -> None:
        raise MemoryError

    monkeypatch.setattr(direct, "Memory", none)
    with pytest.raises(MemoryError):
        DirectFile(tmp_path / "a")
    assert not list(tmp_path.iterdir())
