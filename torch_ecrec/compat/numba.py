"""Private names of Numba's cache of compiled functions.

`njit(cache=True)`, the public way, keeps an entry under the source of one function alone (what is missing there is said
in `runtime/kernel_cache.py`), and Numba has no public way to other folders or files.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from numba.core.caching import CompileResultCacheImpl, FunctionCache, UserWideCacheLocator

__all__ = ["FunctionFiles", "UserFolder", "locators", "set_cache"]


def set_cache(dispatcher: Any, cache: FunctionFiles) -> None:
    """Gives a compiled function its cache; `njit` chooses Numba's own, or none."""
    dispatcher._cache = cache


def locators() -> list[type]:
    """Numba's ways to a folder for the cache, in the order in which it tries them."""
    return list(CompileResultCacheImpl._locator_classes)


class UserFolder(UserWideCacheLocator):
    """Numba's way to a folder below the user's home; a subclass may lead elsewhere.

    Args:
        function, file: what is compiled, and where its source is.
    """

    def __init__(self, function: Any, file: str) -> None:
        super().__init__(function, file)  # type: ignore[no-untyped-call]

    @property
    def folder(self) -> str:
        """The folder that it leads to. Numba reads it by a method, and takes no other."""
        return str(self._cache_path)

    @folder.setter
    def folder(self, path: str) -> None:
        self._cache_path = path


class FunctionFiles(FunctionCache):
    """Numba's cache of one function, with other ways to a folder, and other files there.

    `class Ours(FunctionFiles, ways=[...])` tries these ways, in this order. Numba has both in private fields only.
    """

    def __init_subclass__(cls, *, ways: Sequence[type], **more: Any) -> None:
        super().__init_subclass__(**more)
        made: Any = type("Ways", (CompileResultCacheImpl,), {"_locator_classes": list(ways)})
        cls._impl_class = made

    @property
    def way(self) -> Any:
        """The way that led to a folder."""
        return self._impl.locator

    @property
    def stem(self) -> str:
        """How names of the function's files begin: different for each function; ends in a tag of the interpreter."""
        return str(self._impl.filename_base)

    def keep_in(self, entries: Any) -> None:
        """Has entries loaded from and saved to `entries`, which has `load`, `save` and `flush` as Numba's index has."""
        self._cache_file = entries
