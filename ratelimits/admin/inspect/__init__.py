"""The inspector: a page about one key. It shows the rules for the key, the permits left, and the last refusals."""

from __future__ import annotations
