"""Which forerun this is."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def package_version() -> str:
    """Of the installed package; "0+unknown" in a source tree that is not installed."""
    try:
        return version("forerun")
    except PackageNotFoundError:
        return "0+unknown"
