"""The check of a place for checkpoints: whether it can be written, listed, read and removed.

A small object of a random name is written there, and removed whatever comes in between. A place that hangs is given up;
then the object may stay, and the finding says how it is called.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from torch_ecrec.doctor.findings import Finding, duration
from torch_ecrec.errors import CheckpointError, StoreUnavailable

if TYPE_CHECKING:  # it loads Numba
    from torch_ecrec.storage.location import Location

LIMIT_S = 20.0
PROBE_BYTES = 4096
PACKAGES = {  # of schemes that fsspec knows and has no code for
    "s3": "'torch-ecrec[s3]'",
    "s3a": "'torch-ecrec[s3]'",
    "gs": "gcsfs",
    "gcs": "gcsfs",
    "abfs": "adlfs",
    "abfss": "adlfs",
    "az": "adlfs",
    "oss": "ossfs",
    "oci": "ocifs",
}
LISTED = "a folder of this machine, s3://BUCKET/PATH, gs://..., or another scheme that fsspec knows"


def place(url: str) -> list[Finding]:
    """Examines a place for checkpoints; "": none is to be."""
    if not url:
        return []
    try:
        from torch_ecrec.storage.location import Location, require_place
        from torch_ecrec.storage.store_probe import StoreProbe
    except ImportError as error:
        step = "mend what the findings on packages say"
        return [_bad(f"checkpoints cannot be examined: {error}", "the packages", step)]
    try:
        require_place(url)
        location = Location(url)
    except (CheckpointError, ValueError) as error:
        return [_no_place(url, error)]
    name = f".torch-ecrec-doctor-{secrets.token_hex(8)}"
    probe = StoreProbe(lambda: _try(location, name), url, LIMIT_S, lambda words: None)
    try:
        with _without_new_folders(url):
            return [probe.look()]
    except StoreUnavailable as error:
        if isinstance(error.__cause__, Exception):
            return [_bad(str(error), "a place that can be written and read", _advice(url, error.__cause__))]
        step = f"look at the store and the way there; remove {name} there, should it stay"
        return [_bad(f"{url} hangs: no answer within {LIMIT_S:g} s", "a store that answers", step)]
    except CheckpointError as error:
        return [_bad(str(error), "a place that can be written and read", _advice(url, error.__cause__))]


def _bad(found: str, wanted: str, remedy: str) -> Finding:
    return Finding("checkpoints", "ERROR", found, wanted, remedy)


def _no_place(url: str, error: Exception) -> Finding:
    scheme = url.partition("://")[0].lower()
    if isinstance(error.__cause__, ImportError):
        package = PACKAGES.get(scheme, "the package that it names")
        return _bad(str(error), f"the package for {scheme}://", f"python -m pip install {package}")
    return _bad(str(error), LISTED, f"name the place otherwise: {LISTED}")


def _advice(url: str, cause: BaseException | None) -> str:
    if isinstance(cause, PermissionError):
        return "give this user permission there (chown, the bucket's policy, credentials), or name another place"
    from torch_ecrec.storage.location import folder_of

    if folder_of(url) is None:
        return "look at credentials and endpoint (AWS_PROFILE, FSSPEC_S3_ENDPOINT_URL), and whether the bucket is there"
    return f"look at `ls -ld {url}` and `df {url}`, or name another place"


def _try(location: Location, name: str) -> Finding:
    """Writes, lists, reads and removes the object. Raises CheckpointError."""
    data, began_s = secrets.token_bytes(PROBE_BYTES), time.monotonic()
    wrong = ""
    try:
        location.write_whole(name, data)
    except CheckpointError:
        with contextlib.suppress(CheckpointError):  # why it cannot be written says more
            location.remove(name)
        raise
    wrote_s = time.monotonic() - began_s
    try:
        if name not in location.list():
            wrong = "what was written is not listed"
        elif location.read(name) != data:
            wrong = "what was read is not what was written"
    finally:
        location.remove(name)
    if not wrong and location.exists(name):
        wrong = "what was removed is still there"
    if wrong:
        step = "take a store that shows at once what was written: no cache of listings, no mirror"
        return _bad(f"{location.url}: {wrong}", "a place that can be written, listed, read and removed", step)
    took_s = time.monotonic() - began_s
    found = f"{location.url} can be written, listed, read and removed ({duration(wrote_s)} to write a small object)"
    return Finding("checkpoints", "OK", found, figures={"write_s": wrote_s, "all_s": took_s})


@contextlib.contextmanager
def _without_new_folders(url: str) -> Iterator[None]:
    """Removes, in the end, the folders of this machine that writing has made: a name may have been misspelt."""
    from torch_ecrec.storage.location import folder_of

    new: list[Path] = []
    if (folder := folder_of(url)) is not None:
        with contextlib.suppress(OSError):
            new = [one for one in (folder, *folder.parents) if not one.exists()]
    try:
        yield
    finally:
        for one in new:
            with contextlib.suppress(OSError):  # it was not made, or somebody else has put something into it
                one.rmdir()
