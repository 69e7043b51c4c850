"""Attention over paged caches, one backend a file behind one interface."""

from forerun.attention.interface import AttentionBackend, AttentionSpec, KVShape, QueryTile, StepLayout
from forerun.attention.layout import Segment, lay_out

__all__ = ["AttentionBackend", "AttentionSpec", "KVShape", "QueryTile", "Segment", "StepLayout", "lay_out"]
