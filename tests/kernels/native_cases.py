"""Packed weights for tests: random blocks of each GGUF type that has a packed kind."""

from __future__ import annotations

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize, quantize
from torch import Tensor

from forerun.kernels.packed import KINDS, PackedWeight

TYPES = [ggml_type for ggml_type in KINDS if ggml_type != GGMLQuantizationType.BF16]
QUANTIZABLE = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")  # gguf has no quantiser for the others
SCALES = {"Q4_K": slice(0, 4), "Q5_K": slice(0, 4), "Q6_K": slice(208, 210), "IQ4_NL": slice(0, 2)}


def gguf_rows(ggml_type: GGMLQuantizationType, n: int, k: int, seed: int = 0) -> Tensor:
    """[n, bytes] uint8: as gguf quantises normal numbers, or any bits with scales of the usual size."""
    rng = np.random.default_rng(seed)
    if ggml_type.name in QUANTIZABLE:
        return torch.from_numpy(quantize(rng.standard_normal((n, k), dtype=np.float32), ggml_type))
    values, size = GGML_QUANT_SIZES[ggml_type]
    raw = rng.integers(0, 256, (n * k // values, size), dtype=np.uint8)
    place = SCALES[ggml_type.name]
    scales = rng.uniform(-0.01, 0.01, (len(raw), 2)).astype(np.float16).view(np.uint8)
    raw[:, place] = scales[:, : place.stop - place.start]
    return torch.from_numpy(raw.reshape(n, -1))


def values_of(raw: Tensor, ggml_type: GGMLQuantizationType) -> Tensor:
    """What gguf says the bytes mean, float32."""
    with np.errstate(all="ignore"):  # random bits may be scales that are not finite
        return torch.from_numpy(dequantize(raw.numpy(), ggml_type))


def packed(ggml_type: GGMLQuantizationType, n: int, k: int, seed: int = 0) -> PackedWeight:
    if ggml_type == GGMLQuantizationType.BF16:
        values = torch.randn(n, k, generator=torch.Generator().manual_seed(seed))
        return PackedWeight.of_floats(values.bfloat16(), "bf16")
    return PackedWeight.of_gguf(gguf_rows(ggml_type, n, k, seed), ggml_type, (n, k))


def rows(count: int, k: int, seed: int = 1) -> Tensor:
    return torch.randn(count, k, generator=torch.Generator().manual_seed(seed))
