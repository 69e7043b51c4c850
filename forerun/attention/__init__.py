"""Attention over paged caches, one backend a file behind one interface."""

from forerun.attention.interface import GPU_ROW_TILE, AttentionBackend, AttentionSpec, KVShape, QueryTile, StepLayout
from forerun.attention.layout import Segment, lay_out

__all__ = [
    "GPU_ROW_TILE",
    "AttentionBackend",
    "AttentionSpec",
    "KVShape",
    "QueryTile",
    "Segment",
    "StepLayout",
    "lay_out",
]
