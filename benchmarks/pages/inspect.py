"""Measure how long the inspector takes with many rules, overrides and a large ledger, and how many queries it makes.

    python -m benchmarks.pages.inspect [--lines 5000000] [--rules 1000] [--overrides 100000] [--out DIR]

All rules apply to every key, each in a scope of its own. The ledger covers 30 days. The pages are requested by Django's
test client. At the end Redis is replaced by a server that accepts connections and never answers.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from benchmarks.pages import measuring

URL = "/admin/ratelimits/inspect/"
PAGES = {
    "an API key": f"{URL}?q=api_key:7",
    "an API key and its account": f"{URL}?q=api_key:7&account=acct-1",
    "an account": f"{URL}?q=account:acct-1",
    "an address": f"{URL}?q=203.0.113.9",
    "a part of many keys": f"{URL}?q=pi_key:1",
    "a part of nothing": f"{URL}?q=nobody-has-this",
}


def fill(options: argparse.Namespace) -> tuple[dict[str, Any], dict[str, str]]:
    """Make rules and overrides, fill the ledger and its totals; return the speed of the tally and the pages."""
    from benchmarks.pages.filling import fill_ledger, make_overrides, make_rules
    from ratelimits.models import KeyOverride, KeyTotal, Line
    from ratelimits.usage.tally import tally

    rules = make_rules(options.rules)
    measuring.timed("overridden", lambda: make_overrides(options.overrides, options.rules))
    measuring.timed("filled", lambda: fill_ledger(options.lines, options.keys, rules))
    tallied = measuring.timed("tallied", tally)
    assert Line.objects.count() == options.lines
    filled = {
        "tally, lines/s": round(options.lines / tallied),
        "totals of keys": KeyTotal.objects.count(),
        "overrides": KeyOverride.objects.count(),
    }
    return filled, PAGES


BENCHMARK = measuring.Benchmark(
    "inspect",
    200,
    {
        "lines": (5_000_000, "lines of the ledger"),
        "keys": (10_000, "keys, all of which are used every few hours"),
        "rules": (1_000, "rules that bill and refuse"),
        "overrides": (100_000, "overrides, each of another key"),
    },
    fill,
)


def main(argv: Sequence[str] | None = None) -> int:
    return measuring.main(BENCHMARK, str(__doc__).splitlines()[0], argv)


if __name__ == "__main__":
    sys.exit(main())
