"""The forms of rules and overrides.

The form of a rule shows the rule as sentences, a chart of what it would admit, and the number of its keys.
"""

from __future__ import annotations
