"""Attention over paged caches, one backend a file behind one interface."""

from forerun.attention.interface import AttentionBackend, KVShape, QueryTile, StepLayout
from forerun.attention.layout import Segment, lay_out

__all__ = ["AttentionBackend", "KVShape", "QueryTile", "Segment", "StepLayout", "lay_out"]
