"""KV Cache Isolation Lab: who may read whose keys and values, and how to find out."""

from __future__ import annotations

import platform
from importlib.metadata import version

__version__ = "0.1.0"


def versions() -> str:
    """One line that says what a notebook ran on."""
    packages = ", ".join(
        f"{name} {version(name)}" for name in ("torch", "transformers", "papermill")
    )
    return f"kvlab {__version__}, Python {platform.python_version()}, {packages}"
