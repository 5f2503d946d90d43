"""Measure how long the status page and the admin's index take with a large ledger, and how many queries they make.

    python -m benchmarks.pages.status [--lines 5000000] [--keys 10000] [--out DIR]

The ledger covers 30 days. The pages are requested by Django's test client. At the end Redis is replaced by a server
that accepts connections and never answers.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from benchmarks.pages import measuring

PAGES = {
    "status, 24 hours": "/admin/ratelimits/status/",
    "status, 30 days": "/admin/ratelimits/status/?window=month",
    "shadow refusals": "/admin/ratelimits/shadow/",
    "the admin's index": "/admin/",
}


def fill(options: argparse.Namespace) -> tuple[dict[str, Any], dict[str, str]]:
    """Fill the ledger and its totals; return the speed of the tally and the pages."""
    from benchmarks.pages.filling import declare_outage, fill_ledger, make_rules
    from ratelimits.models import KeyTotal, Line, RuleTotal
    from ratelimits.usage.tally import tally

    rules = make_rules(options.rules)
    measuring.timed("filled", lambda: fill_ledger(options.lines, options.keys, rules))
    tallied = measuring.timed("tallied", tally)
    declare_outage(options.keys // 10)
    assert Line.objects.count() == options.lines
    totals = KeyTotal.objects.count() + RuleTotal.objects.count()
    return {"tally, lines/s": round(options.lines / tallied), "rows of totals": totals}, PAGES


BENCHMARK = measuring.Benchmark(
    "status",
    500,
    {
        "lines": (5_000_000, "lines of the ledger"),
        "keys": (10_000, "keys, all of which are used every few hours"),
        "rules": (20, "rules that bill and refuse"),
    },
    fill,
)


def main(argv: Sequence[str] | None = None) -> int:
    return measuring.main(BENCHMARK, str(__doc__).splitlines()[0], argv)


if __name__ == "__main__":
    sys.exit(main())
