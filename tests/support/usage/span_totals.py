"""Compare the totals of short spans with the sums of the ledger's lines, which are added up here."""

from __future__ import annotations

import time
from collections import Counter

from ratelimits.usage.ledger.span_totals import first_start
from ratelimits.usage.models import KeyTotal, Line, RuleTotal
from ratelimits.usage.models.totals import DAY, FIVE_DAYS, HOUR, QUARTER, SIX_HOURS, SUMS

_RULE, _KEY = ("rule", "meter"), ("account", "key", "rule", "meter")
_SPANS = (
    *((_RULE, span) for span in (QUARTER, DAY)),
    *((_KEY, span) for span in (QUARTER, HOUR, SIX_HOURS, DAY, FIVE_DAYS)),
)


def check_span_totals() -> None:
    """Check that each total is the sum of its lines, and that no line of a kept span is missing."""
    now, expected = int(time.time()), Counter[tuple[object, ...]]()
    for line in Line.objects.all():
        for names, span in _SPANS:
            if line.bin >= first_start(span, now):
                subject = (len(names), span, line.bin // span * span, *(getattr(line, name) for name in names))
                # Of keys, a quarter of an hour has refusals alone.
                counters = SUMS[1:] if (names, span) == (_KEY, QUARTER) else SUMS
                expected.update({(*subject, name): getattr(line, name) for name in counters})
    found = Counter(
        {
            (len(names), row.span, row.start, *(getattr(row, name) for name in names), counter): getattr(row, counter)
            for model, names in ((RuleTotal, _RULE), (KeyTotal, _KEY))
            for row in model.objects.all()
            if row.start >= first_start(row.span, now)
            for counter in SUMS
        }
    )
    assert +found == +expected
