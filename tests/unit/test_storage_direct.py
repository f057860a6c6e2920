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
