"""Attention over paged caches, one backend a file behind one interface."""

from forerun.attention.interface import AttentionBackend, AttentionSpec, KVShape, QueryTile, StepLayout

__all__ = ["AttentionBackend", "AttentionSpec", "KVShape", "QueryTile", "StepLayout"]
