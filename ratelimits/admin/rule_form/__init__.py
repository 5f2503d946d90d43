"""The form of a rule. It shows the rule as sentences, a chart of what it would admit, and the number of its keys."""

from __future__ import annotations
