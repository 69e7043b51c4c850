"""The operations that models and attention are made of: one door, so that a faster twin can stand in for each."""

from forerun.kernels.reference import check_row_exactness, gated, linear, rms_norm, rope

__all__ = ["check_row_exactness", "gated", "linear", "rms_norm", "rope"]
