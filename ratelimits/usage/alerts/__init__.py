"""Send alerts by signal, e-mail and webhook when an account reaches a threshold of its quota."""

from __future__ import annotations
