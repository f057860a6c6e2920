"""Checks of arguments, a line each, and conversion of NumPy's and torch's numbers to Python's.

    take_int("k", ids.max() + 1, 1)          NumPy's and tensors' numbers are Python's from there on, bit for bit
    take_float("lr", np.float32(0.1))        0.10000000149011612
    take_float("lr", "0.1")                  TypeError: `lr` must be a number, got '0.1'

Numbers are converted where they come in (`take_fields` in a record, the others in a function that users call), so that
what lies behind may compare, add and write them into JSON. Loads neither NumPy nor torch.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

R = TypeVar("R")
Flag = int
"""Of a field that is 0 or 1, and may be given as a bool."""


def require(condition: bool, message: str) -> None:
    """Raises `ValueError(message)` unless `condition` holds."""
    if not condition:
        raise ValueError(message)


def require_int(name: str, value: object, least: int, most: int | None = None) -> None:
    """Raises unless `value` is an int with `least <= value <= most`."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"`{name}` must be an int, got {shown(value)}")
    if value < least:
        raise ValueError(f"`{name}` must be at least {least}, got {value}")
    if most is not None and value > most:
        raise ValueError(f"`{name}` must be at most {most}, got {value}")


def require_kind(name: str, value: object, kind: type) -> None:
    """Raises TypeError unless `value` is of this class: a dict, as of a file of settings, is not taken apart."""
    if not isinstance(value, kind):
        named = isinstance(value, dict) and all(isinstance(key, str) for key in value)
        given = ", ".join(f"{key}={shown(one)}" for key, one in value.items()) if named else "..."  # type: ignore[attr-defined]
        raise TypeError(f"`{name}` must be a {kind.__name__}, got {shown(value)}: pass {kind.__name__}({given})")


def plain(value: Any) -> Any:
    """Returns NumPy's numbers, bools and strings, and tensors without dimensions, as Python's; else `value`."""
    if getattr(value, "ndim", None) == 0 and hasattr(value, "item") and not getattr(value, "is_meta", False):
        return value.item()
    return value


def plain_all(value: Any) -> Any:
    """Like `plain`, and for the elements of a list or tuple, too. Returns `value` itself if nothing changes."""
    if type(value) not in (list, tuple):
        return plain(value)
    found = [plain(one) for one in value]
    return value if all(a is b for a, b in zip(found, value, strict=True)) else type(value)(found)


def shown(value: object) -> str:
    """Returns a value as messages show it: an array in brief."""
    shape = getattr(value, "shape", None)
    return f"{type(value).__name__} of shape {tuple(shape)}" if isinstance(shape, tuple) and shape else repr(value)


def plain_copy(record: R, names: Iterable[str]) -> R:
    """Returns the object, or a shallow copy if one of these attributes is not Python's own: see `plain_all`."""
    given = {name: getattr(record, name) for name in names}
    found = {name: plain_all(value) for name, value in given.items()}
    if all(found[name] is value for name, value in given.items()):
        return record
    made = copy.copy(record)
    vars(made).update(found)
    return made


def take_int(name: str, value: object, least: int, most: int | None = None) -> int:
    """Returns an integer as Python's int. Raises as `require_int`."""
    found = plain(value)
    require_int(name, found, least, most)
    return int(found)


def take_float(name: str, value: object) -> float:
    """Returns a number as Python's float. Raises TypeError if it is no number, ValueError if it is NaN."""
    found = plain(value)
    if isinstance(found, bool) or not isinstance(found, (int, float)):
        raise TypeError(f"`{name}` must be a number, got {shown(value)}")
    if math.isnan(found):
        raise ValueError(f"`{name}` must be a number, got {found}")
    return float(found)


def take_bool(name: str, value: object) -> bool:
    """Returns a bool as Python's bool. Raises TypeError if it is none."""
    found = plain(value)
    if not isinstance(found, bool):
        raise TypeError(f"`{name}` must be True or False, got {shown(value)}")
    return found


def take_str(name: str, value: object) -> str:
    """Returns a string as Python's str. Raises TypeError if it is none."""
    found = plain(value)
    if not isinstance(found, str):
        raise TypeError(f"`{name}` must be a string, got {shown(value)}")
    return found


def _take_any_int(name: str, value: object) -> int:
    found = plain(value)
    if isinstance(found, bool) or not isinstance(found, int):
        raise TypeError(f"`{name}` must be an int, got {shown(value)}")
    return int(found)


def _take_flag(name: str, value: object) -> int:
    found = plain(value)
    return int(found) if isinstance(found, bool) else _take_any_int(name, found)


_TAKES: dict[str, Callable[[str, object], object]] = {
    "int": _take_any_int,
    "float": take_float,
    "bool": take_bool,
    "str": take_str,
    "Flag": _take_flag,
}


def take_fields(record: Any, of: str = "") -> None:
    """Converts the number, bool and string fields of a new dataclass to Python's own types, in place.

    Fields of other types are left as they are. To be called first in `__post_init__`, in a module with
    `from __future__ import annotations`: the declarations are read as text.

    Args:
        record: may be frozen.
        of: behind a field's name in messages, say " of table users".

    Raises:
        TypeError: a field has another kind of value than it is declared as.
        ValueError: a number is NaN.
    """
    for field in dataclasses.fields(record):
        declared, value = str(field.type), getattr(record, field.name)
        optional = declared.endswith(" | None")
        take = _TAKES.get(declared.removesuffix(" | None"))
        if take is not None and not (optional and value is None):
            object.__setattr__(record, field.name, take(f"{field.name}{of}", value))
