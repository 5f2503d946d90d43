"""Template tags of the app's pages."""

from __future__ import annotations
