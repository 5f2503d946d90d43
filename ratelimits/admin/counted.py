"""What the count of usage adds to the pages of rules and keys."""

from __future__ import annotations

from ratelimits.admin.status.usage import recent_refusals, requests_over_time
from ratelimits.status.additions import Additions

ADDITIONS = Additions(
    status=requests_over_time,
    index=recent_refusals,
)
