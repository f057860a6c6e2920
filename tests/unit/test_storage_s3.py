"""Checkpoints in an object store: a real server of S3's protocol (moto's), in this process, over the loopback."""

import uuid
from collections.abc import Iterator

import numpy as np
import pytest
from kept import Shelf
from test_storage_catalog import test_chains_of_checkpoints as chains
from test_storage_catalog import test_files_of_a_place as files
from test_storage_catalog import test_what_interrupted_attempts_left_is_removed as cleaning
from test_storage_catalog import test_what_is_kept as keeping

from torch_ecrec.errors import CheckpointError
from torch_ecrec.storage.catalog import Catalog
from torch_ecrec.storage.location import Location

s3fs = pytest.importorskip("s3fs", reason="s3fs is not installed: checkpoints in object stores are not tested")
moto_server = pytest.importorskip("moto.server", reason="moto is not installed: object stores are not tested")
fsspec = pytest.importorskip("fsspec")

MULTIPART_BYTES = 5 << 20  # the least that S3 takes as a part of an object


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """The address of a server that runs while the tests of this module do."""
    running = moto_server.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    running.start()
    host, port = running.get_host_and_port()
    yield f"http://{host}:{port}"
    running.stop()


@pytest.fixture
def bucket(server: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The URL of an empty bucket. Users say where their store is as this does, or in the environment."""
    said = {"endpoint_url": server, "key": "testing", "secret": "testing"}
    monkeypatch.setitem(fsspec.config.conf, "s3", said)
    name = f"bucket-{uuid.uuid4().hex[:12]}"
    files = fsspec.filesystem("s3")
    files.mkdir(name)
    yield f"s3://{name}/some/folder"
    fsspec.filesystem("s3").clear_instance_cache()


@pytest.mark.parametrize(
    "test",
    [pytest.param(chains, marks=pytest.mark.slow), files, cleaning, keeping],
    ids=["chains", "files", "cleaning", "keeping"],
)
def test_as_in_a_folder(bucket: str, tmp_path, test) -> None:
    test(tmp_path, lambda folder: bucket)


def test_an_object_appears_whole_or_not_at_all(bucket: str) -> None:
    """Also one that is sent in several parts."""
    place = Location(bucket)
    data = np.random.default_rng(0).integers(0, 256, 12 * MULTIPART_BYTES, np.uint8)
    lost, kept = place.open_write("lost"), place.open_write("kept")
    for begin in range(0, len(data), MULTIPART_BYTES):
        lost.write(data[begin : begin + MULTIPART_BYTES])
        kept.write(data[begin : begin + MULTIPART_BYTES])
    assert place.list() == []
    lost.abandon()
    kept.close()
    assert place.list() == ["kept"] and place.size("kept") == len(data)
    assert place.read_range("kept", 7_000_000, 9) == data[7_000_000:7_000_009].tobytes()
    found = np.empty(len(data) + 1, np.uint8)
    assert place.open_read("kept").read_into(found) == len(data)
    np.testing.assert_array_equal(found[:-1], data)


def test_what_others_see(bucket: str) -> None:
    """Another process, whose listings are not those of this one."""
    shelf, other = Shelf(bucket), Catalog(bucket)
    assert other.checkpoints() == []
    one = shelf.write(1)
    assert [m.id for m in other.checkpoints()] == [one.id]
    shelf.catalog.remove(one.id)
    assert other.checkpoints() == [] and other.listing().unfinished == []


def test_a_store_that_refuses_or_is_gone(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CheckpointError, match=r"cannot write s3://no-such-bucket-at-all/x/") as found:
        Shelf("s3://no-such-bucket-at-all/x").write(1)
    assert found.value.__cause__ is not None
    nobody = {"endpoint_url": "http://127.0.0.1:9", "key": "k", "secret": "s"}
    nobody["config_kwargs"] = {"connect_timeout": 1, "retries": {"max_attempts": 0}}
    monkeypatch.setitem(fsspec.config.conf, "s3", nobody)
    with pytest.raises(CheckpointError, match=r"cannot list s3://.*look whether the place can be reached"):
        Catalog(bucket).checkpoints()
