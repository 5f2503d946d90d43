"""The start of a key under a rule: rules that do not begin at zero."""

from __future__ import annotations
