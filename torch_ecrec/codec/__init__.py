"""The erasure code: kernels of the field (`field`), the (k, r) code over it (`linear`), seals (`seals`); and packing
of words sent between hosts (`packing`).
"""

from torch_ecrec.codec import field, packing, seals
from torch_ecrec.codec.field import fold_rows_, xor_rows_
from torch_ecrec.codec.linear import LinearCode


def warm() -> None:
    """Compiles or loads every kernel of the package."""
    field.warm()
    seals.warm()
    packing.warm()


__all__ = ["LinearCode", "fold_rows_", "warm", "xor_rows_"]
