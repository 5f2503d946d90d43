"""The form of a rule: starting points, what the rule says in sentences, what it would admit, and whom it would meet."""

from __future__ import annotations
