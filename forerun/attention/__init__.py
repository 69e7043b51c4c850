"""Attention over paged caches, one backend a file behind one interface."""

from forerun.attention.interface import (
    GPU_ROW_TILE,
    AttentionBackend,
    AttentionInputs,
    AttentionSpec,
    KVShape,
    QueryTile,
    Rope,
    StepLayout,
)
from forerun.attention.layout import Segment, lay_out

__all__ = [
    "GPU_ROW_TILE",
    "AttentionBackend",
    "AttentionInputs",
    "AttentionSpec",
    "KVShape",
    "QueryTile",
    "Rope",
    "Segment",
    "StepLayout",
    "lay_out",
]
