"""Versions of what a result depends on."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version


def versions() -> dict[str, str]:
    """Versions of what a result depends on."""
    found = {"python": platform.python_version()}
    for name in ("arpo", "torch", "transformers", "gymnasium", "numpy", "math-verify", "antlr4-python3-runtime", "tantivy", "peft"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found
