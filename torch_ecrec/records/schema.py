"""The layout of a record: which fields it has, and where they are. It is defined here alone.

A *record* is what a server keeps for one row of a table: its weights, then what the table's optimizer keeps for it, as
fields one behind the other. Example: dim = 2 with row-wise Adagrad is the fields `weight` (2 values) and `momentum1` (1
value): 12 bytes, the weights (1.0, -2.0) with state 0.5 being 00 00 80 3f 00 00 00 c0 00 00 00 3f.

Weights may have 16 bits (`halves.py`); state is float32. Names of optimizer state are TorchRec's, under which
checkpoints have it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property

from torch_ecrec.runtime.checks import require, require_int

WEIGHT = "weight"
ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}  # of a number, by its dtype
WORD_BYTES = 4  # a field is a whole number of words; what its numbers leave of the last is 0
_DTYPES = ", ".join(ITEM_BYTES)


@dataclass(frozen=True)
class Field:
    """One field of every record of a schema.

    Args:
        name: unique in the schema.
        values: how many numbers it has.
        per_row: one number for the row, which TorchRec has as a vector over rows; else one for each weight.
        dtype: of each number. Weights may be of 16 bits (`halves.py`); state is float32.
    """

    name: str
    values: int
    per_row: bool = False
    dtype: str = "float32"

    def __post_init__(self) -> None:
        require_int(f"values of field {self.name}", self.values, 1)
        require(self.dtype in ITEM_BYTES, f"field {self.name}: records have {_DTYPES}, got {self.dtype}")

    @property
    def nbytes(self) -> int:
        """The bytes that it takes of a record, rounded up to whole words."""
        return -(-self.values * ITEM_BYTES[self.dtype] // WORD_BYTES) * WORD_BYTES


@dataclass(frozen=True)
class StateField:
    """One field of the state that an optimizer keeps for a row, for any number of weights."""

    name: str
    per_row: bool = False

    def of(self, dim: int) -> Field:
        """Returns the field as it is in records of `dim` weights."""
        return Field(self.name, 1 if self.per_row else dim, self.per_row)


@dataclass(frozen=True)
class Schema:
    """The fields of a record in their order in memory. The first one is the weights."""

    fields: tuple[Field, ...]

    def __post_init__(self) -> None:
        names = [field.name for field in self.fields]
        require(names[:1] == [WEIGHT], f"a record begins with `{WEIGHT}`, got {names}")
        require(len(set(names)) == len(names), f"fields must have different names, got {names}")
        wrong = [field.name for field in self.state if field.dtype != "float32"]
        require(not wrong, f"optimizer state is float32, got other fields {', '.join(wrong)}")

    @staticmethod
    @cache  # an optimizer asks for it in every step
    def of(dim: int, state: tuple[StateField, ...] = (), weights: str = "float32") -> Schema:
        """Makes the schema of a table with `dim` weights of a dtype in a row, and with this optimizer state."""
        return Schema((Field(WEIGHT, dim, dtype=weights), *(field.of(dim) for field in state)))

    @property
    def dim(self) -> int:
        """The number of weights in a record."""
        return self.fields[0].values

    @property
    def state(self) -> tuple[Field, ...]:
        """The fields of optimizer state: all but the weights."""
        return self.fields[1:]

    @property
    def weights(self) -> str:
        """The dtype of the weights."""
        return self.fields[0].dtype

    @property
    def halves(self) -> bool:
        """Whether weights have 16 bits."""
        return ITEM_BYTES[self.weights] == 2

    @property
    def bfloat16(self) -> bool:
        """Returns whether weights are kept as bfloat16."""
        return self.weights == "bfloat16"

    @cached_property
    def width(self) -> int:
        """The number of numbers in a record."""
        return sum(field.values for field in self.fields)

    @cached_property
    def nbytes(self) -> int:
        """The number of bytes in a record."""
        return sum(field.nbytes for field in self.fields)

    def field(self, name: str) -> Field:
        """Returns the field of that name.

        Raises:
            KeyError: there is none.
        """
        for field in self.fields:
            if field.name == name:
                return field
        raise KeyError(f"records have no field {name!r}, only {[field.name for field in self.fields]}")

    def bytes_of(self, name: str) -> tuple[int, int]:
        """Returns the byte range [begin, end) of a field's numbers in a record.

        Raises:
            KeyError: there is no such field.
        """
        wanted = self.field(name)
        begin = sum(field.nbytes for field in self.fields[: self.fields.index(wanted)])
        return begin, begin + wanted.values * ITEM_BYTES[wanted.dtype]

    def columns(self, name: str) -> tuple[int, int]:
        """Returns the range [begin, end) of a field in a record, counted in numbers.

        Raises:
            KeyError: there is no such field.
        """
        begin = 0
        for field in self.fields:
            if field.name == name:
                return begin, begin + field.values
            begin += field.values
        raise KeyError(f"records have no field {name!r}, only {[field.name for field in self.fields]}")
