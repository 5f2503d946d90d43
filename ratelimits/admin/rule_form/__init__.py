"""The forms of rules and overrides.

The form of a rule shows the rule as sentences, a chart of what the rule would admit, and the number of keys that the
rule applies to.
"""

from __future__ import annotations
