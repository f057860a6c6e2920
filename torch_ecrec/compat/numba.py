"""The private names of Numba's cache of compiled functions.

`njit(cache=True)`, the public way, keeps an entry under the source of one function alone (what is missing there is said
in `runtime/kernel_cache.py`), and Numba has no public way to other folders or files.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from numba.core.caching import CompileResultCacheImpl, FunctionCache, UserWideCacheLocator

__all__ = ["FunctionFiles", "UserFolder", "locators", "set_cache"]


def set_cache(dispatcher: Any, cache: FunctionFiles) -> None:
    """Gives a compiled function this cache. `njit` itself chooses Numba's own, or none."""
    dispatcher._cache = cache


def locators() -> list[type]:
    """Returns Numba's locators of cache folders, in the order in which it tries them."""
    return list(CompileResultCacheImpl._locator_classes)


class UserFolder(UserWideCacheLocator):
    """Numba's locator of a cache folder below the user's home. A subclass may choose another folder.

    Args:
        function, file: what is compiled, and where its source is.
    """

    def __init__(self, function: Any, file: str) -> None:
        super().__init__(function, file)  # type: ignore[no-untyped-call]

    @property
    def folder(self) -> str:
        """The chosen folder. Numba asks for it by a method only."""
        return str(self._cache_path)

    @folder.setter
    def folder(self, path: str) -> None:
        self._cache_path = path


class FunctionFiles(FunctionCache):
    """Numba's cache of one function, with other locators and other files.

    `class Ours(FunctionFiles, ways=[...])` tries these ways, in this order. Numba has both in private fields only.
    """

    def __init_subclass__(cls, *, ways: Sequence[type], **more: Any) -> None:
        super().__init_subclass__(**more)
        made: Any = type("Ways", (CompileResultCacheImpl,), {"_locator_classes": list(ways)})
        cls._impl_class = made

    @property
    def way(self) -> Any:
        """The locator that found the folder."""
        return self._impl.locator

    @property
    def stem(self) -> str:
        """The beginning of the names of the function's files, unique to it. It ends in a tag of the interpreter."""
        return str(self._impl.filename_base)

    def keep_in(self, entries: Any) -> None:
        """Makes entries load from and save to `entries`, which has `load`, `save`, `flush` as Numba's index does."""
        self._cache_file = entries
