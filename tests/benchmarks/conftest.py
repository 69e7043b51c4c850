"""Benchmarks are scripts that import what lies beside them."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
