"""The form of a rule. It shows the rule in sentences, a chart of what it would admit, and how many keys it affects."""

from __future__ import annotations
