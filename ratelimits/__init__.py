"""Rate limits, quotas and usage billing for Django."""

from __future__ import annotations

import sys

if sys.platform == "win32":
    raise ImportError("ratelimits runs on Linux and macOS. On Windows, run the project in WSL, which runs Linux.")

__version__ = "0.1.0"
