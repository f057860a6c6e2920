"""Bytes and coefficients: the field's kernels (`field`) and the systematic (k, r) code over it (`linear`)."""

from torch_ecrec.codec.field import fold_rows_, warm, xor_rows_
from torch_ecrec.codec.linear import LinearCode

__all__ = ["LinearCode", "fold_rows_", "warm", "xor_rows_"]
