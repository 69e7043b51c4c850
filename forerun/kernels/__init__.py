"""The operations that models and attention are made of: one door, so that a faster twin can stand in for each."""

from forerun.kernels.reference import check_row_exactness, linear, rms_norm, rope, silu_mul

__all__ = ["check_row_exactness", "linear", "rms_norm", "rope", "silu_mul"]
