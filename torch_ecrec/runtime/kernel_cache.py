"""`kernel`, the decorator of every compiled function: Numba's `njit`, cached on disk in files of our own.

Numba keeps what it compiled under the content of the file that defines a function. But a kernel has inside, from other
files too, the code of all that it calls and the values of constants. When only such a file changed, with an upgrade,
Numba would go on running what it compiled of the old one: other bits than other processes have, and nobody is told. So
the name of an entry has a digest of the sources of all kernels:

    __pycache__/field._fold_rows-251.py311.5d0c...41.9b7e...c3.nbc
                                           sources   signature, processor, the function's code

Invariants, with any number of processes that start at once:

    an entry is a file, whole or not there, and is written once for all under its name; there is no index, whose lines
    may be of one process and its data of another

    whoever writes an entry removes those of other sources from the folder: they do not pile up

    a cache is no condition: what cannot be kept or read is compiled, and the log says once why, and what that costs

Where entries lie is Numba's choice and the user's (NUMBA_CACHE_DIR): beside the sources, or below ~/.cache where that
may not be written; where that may not be either, as for a container's user without a home, in a folder of the user's
for temporary files. Entries beside the sources are read also by who may not write there: `torch-ecrec warm` as the
package's owner, in the image of a container say, spares all others the time. Sources must be files: they are read when
the first kernel is defined.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import os
import pickle
import re
import stat
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numba
from numba.core.caching import UserWideCacheLocator
from numba.core.serialize import dumps
from numba.extending import is_jitted

from torch_ecrec.compat.numba import FunctionFiles, UserFolder, locators, set_cache
from torch_ecrec.runtime.files import write_whole

log = logging.getLogger(__name__)

PACKAGE = Path(__file__).resolve().parent.parent
# Whole rooms: kernels use functions and constants of each other, and to compile once too often costs seconds only.
# The Makefile names the same ones.
ROOMS = ("codec", "layout", "records", "runtime")
FILES = (
    *("client/pooling.py", "storage/row_ids.py", "storage/seen.py"),
    *("compat/numba.py", "compat/python.py", "errors.py"),
)


def kernel(**options: Any) -> Callable[[Callable[..., Any]], Any]:
    """Compiles the decorated function for each signature that it is called with, or loads it from the cache.

    Args:
        options: Numba's (`error_model`, `inline`), but not `cache`. All kernels run without the interpreter's lock.
    """

    def compiled(function: Callable[..., Any]) -> Any:
        dispatcher: Any = numba.njit(nogil=True, **options)(function)
        compiles = is_jitted(dispatcher)  # else the user has set NUMBA_DISABLE_JIT
        if compiles:
            set_cache(dispatcher, KernelCache(function))
        return dispatcher

    return compiled


def source_files() -> list[Path]:
    """Returns the source files of all that may be inside a kernel, in a fixed order."""
    rooms = (path for room in ROOMS for path in (PACKAGE / room).rglob("*.py"))
    return sorted([*rooms, *(PACKAGE / name for name in FILES)])


@functools.cache
def digest_of_sources() -> str:
    """Returns 16 hexadecimal digits that change with the sources of kernels and with Numba's version."""
    digest = hashlib.blake2b(numba.__version__.encode(), digest_size=8)
    for path in source_files():
        source = path.read_bytes()
        digest.update(f"\n{path.relative_to(PACKAGE).as_posix()} {len(source)}\n".encode())
        digest.update(source)
    return digest.hexdigest()


_said: set[str] = set()


def _say_once(what: str, why: object) -> None:
    """Logs a warning once for all kernels of this process, and of those forked from it."""
    if what not in _said:
        _said.add(what)
        log.warning(
            "compiled kernels are %s (%s). Each process that begins compiles what it needs, all of it is about 90 s of"
            " a core; NUMBA_CACHE_DIR=FOLDER names a folder that may be written, for this user's processes alone",
            what,
            why,
        )


class _Elsewhere(UserFolder):
    """A cache folder for users who cannot write beside the sources and have named no other folder."""

    def __init__(self, function: Any, file: str) -> None:
        super().__init__(function, file)
        self.beside = os.path.join(os.path.dirname(file), "__pycache__")


class _InHome(_Elsewhere):
    def ensure_cache_path(self) -> None:
        if not os.path.isabs(self.folder):  # "~/.cache" of who has no home: it would be made in the working folder
            raise FileNotFoundError(f"{self.folder}: this user has no home")
        super().ensure_cache_path()  # type: ignore[no-untyped-call]


class _InTemporary(_Elsewhere):
    """A cache below the temporary folder, of this user alone: who may write there runs code in our processes."""

    def __init__(self, function: Any, file: str) -> None:
        super().__init__(function, file)
        self._own = os.path.join(tempfile.gettempdir(), f"torch-ecrec-kernels-{os.geteuid()}")
        self.folder = os.path.join(self._own, os.path.basename(self.folder))

    def ensure_cache_path(self) -> None:
        with contextlib.suppress(FileExistsError):
            os.mkdir(self._own, 0o700)
        found = os.lstat(self._own)
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
            raise PermissionError(f"{self._own} is not a folder of this user's alone")
        super().ensure_cache_path()  # type: ignore[no-untyped-call]


class _Nowhere(_Elsewhere):
    """A cache that writes nothing, where no folder can be written."""

    def __init__(self, function: Any, file: str) -> None:
        super().__init__(function, file)
        self.folder = self.beside

    def ensure_cache_path(self) -> None:
        pass


# Numba's ways to a folder, with more of them.
_WAYS = (*(_InHome if one is UserWideCacheLocator else one for one in locators()), _InTemporary, _Nowhere)


class KernelCache(FunctionFiles, ways=_WAYS):
    """Numba's cache of one function, kept in files of our own (`Entries`)."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(function)  # type: ignore[no-untyped-call]
        self._writes = not isinstance(self.way, _Nowhere)
        beside = [Path(self.way.beside)] if isinstance(self.way, _Elsewhere) else []
        self.keep_in(Entries(Path(self.cache_path), self.stem, digest_of_sources(), beside))

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """Returns the compiled code for a signature; None if there is none that can be loaded."""
        try:
            return super().load_overload(sig, target_context)  # type: ignore[no-untyped-call]
        except Exception as error:  # a file that a disk has damaged may raise anything: the kernel is compiled anew
            _say_once(f"not read from {self.cache_path}", f"{type(error).__name__}: {error}")
            return None

    def save_overload(self, sig: Any, data: Any) -> None:
        """Saves compiled code. If that fails, it warns once."""
        if not self._writes:
            _say_once("kept nowhere", f"there is no folder for them: not {self.cache_path}, nor a home, nor /tmp")
            return
        try:
            super().save_overload(sig, data)  # type: ignore[no-untyped-call]
        except OSError as error:
            _say_once(f"not written to {self.cache_path}", error.strerror or error)


class Entries:
    """The cached code of one function: a file for each of Numba's keys, in a folder shared with other functions.

    Args:
        folder: where.
        name: of the function, different for each in the folder; ends in a tag of the interpreter (".py311").
        sources: their digest.
        others: folders that are read, too, and not written.
    """

    def __init__(self, folder: Path, name: str, sources: str, others: Sequence[Path] = ()) -> None:
        self._folder, self._name, self._sources, self._others = folder, name, sources, others

    def load(self, key: Any) -> Any:
        """Returns what was saved under the key; None if nothing was."""
        name = self._path(key).name
        for folder in (self._folder, *self._others):
            with contextlib.suppress(FileNotFoundError):
                of, data = pickle.loads((folder / name).read_bytes())
                return data if of == key else None
        return None

    def save(self, key: Any, data: Any) -> None:
        """Saves `data`, and removes files of older sources from the folder."""
        write_whole(self._path(key), dumps((key, data)))  # type: ignore[no-untyped-call]
        tag = re.escape(self._name.rpartition(".")[2])
        of_others = re.compile(rf".*\.{tag}\.(?!{self._sources})[0-9a-f]{{16}}\.[0-9a-f]{{32}}\.nbc")
        self._remove(lambda name: of_others.fullmatch(name) is not None)

    def flush(self) -> None:
        """Removes the files that have a compiled function."""
        start = f"{self._name}.{self._sources}."
        self._remove(lambda name: name.startswith(start) and name.endswith(".nbc"))

    def _path(self, key: Any) -> Path:
        digest = hashlib.blake2b(repr(key).encode(), digest_size=16).hexdigest()
        return self._folder / f"{self._name}.{self._sources}.{digest}.nbc"

    def _remove(self, which: Callable[[str], bool]) -> None:
        for name in filter(which, os.listdir(self._folder)):
            # Another process was first; or it is another user's, in a folder where that forbids it: nobody reads it.
            with contextlib.suppress(FileNotFoundError, PermissionError):
                os.unlink(self._folder / name)
