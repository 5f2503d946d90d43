"""The row of a report: DESIGN's columns, in their order, and how each is written."""

from __future__ import annotations

import hashlib
from decimal import Decimal
from functools import lru_cache
from typing import NamedTuple
from urllib.parse import quote

from ratelimits.engine.keys import ANONYMOUS
from ratelimits.pricing.prices import PricedPart
from ratelimits.reports.periods import iso

PROVISIONAL, FINAL = "provisional", "final"
USAGE, ADJUSTMENT = "usage", "adjustment"
#: Categories of charges that are no line of the first schema.
FEE, REPRICING, MINIMUM, ROUNDING = "fee", "repricing", "minimum", "rounding"
CORRECTION = "correction"


# A tuple: reports have millions of rows, and a frozen dataclass of 29 fields takes twenty times as long to make.
class Row(NamedTuple):
    """One line of a report. Moments are µs since 1970 UTC, intervals half-open, quantities whole units of the meter.

    consumed_quantity is what was admitted; less refunded_quantity it is included_quantity + overage_quantity.
    `limit` is the capacity (or rate) that the rule, or its override, had for the key in that version; "" if it is not
    known, or changed within the line.
    """

    report_id: str
    report_version: int
    status: str
    line_id: str
    account: str
    key: str
    meter: str
    unit: str
    charge_category: str
    charge_class: str
    corrects_line_id: str
    billing_period_start: int
    billing_period_end: int
    charge_period_start: int
    charge_period_end: int
    timezone: str
    consumed_quantity: int
    included_quantity: int
    overage_quantity: int
    refunded_quantity: int
    admitted_count: int
    denied_count: int
    unknown_count: int
    limit: str
    rule: str
    rule_version: int
    plan: str
    batch_range: str
    durability_gap: str

    def texts(self) -> list[str]:
        """The values as every export writes them: moments in ISO 8601, numbers as decimals."""
        return [write(value) for write, value in zip(_WRITE, self, strict=True)]


class Charge(NamedTuple):
    """A row and what it costs.

    `amount` is None, and `currency` "", where there is no price. `parts` are the units of the row that cost the same.
    `total` is what the account owes by the report, up to the row's version: "" where there is no price.
    """

    row: Row
    account_name: str = ""
    currency: str = ""
    parts: tuple[PricedPart, ...] = ()
    amount: Decimal | None = None
    total: str = ""


COLUMNS = Row._fields
#: Columns whose values are moments.
MOMENTS = frozenset({"billing_period_start", "billing_period_end", "charge_period_start", "charge_period_end"})
_WRITE = tuple(iso if name in MOMENTS else str for name in COLUMNS)
#: Columns whose values are numbers.
QUANTITIES = frozenset(
    {
        "report_version",
        "consumed_quantity",
        "included_quantity",
        "overage_quantity",
        "refunded_quantity",
        "admitted_count",
        "denied_count",
        "unknown_count",
        "rule_version",
    }
)


@lru_cache(maxsize=4096)
def report_id(account: str, start: int) -> str:
    """The name of an account's report of the period that starts then; the same in every database."""
    compact = iso(start).replace("-", "").replace(":", "")
    return f"{quote(account, safe='') or ANONYMOUS}.{compact}"


def line_id(report: str, *about: str | int) -> str:
    """A line's name, from what it is about; the same in every database, so a second delivery is recognised."""
    parts = [report, *map(str, about)]
    if not any("\n" in part for part in parts):
        return joined_line_id(report, *about)
    # With their lengths, so that no other parts make the same text; no report's name is empty.
    return _name("\n" + "".join(f"{len(part)}:{part}" for part in parts))


def joined_line_id(report: str, *about: str | int) -> str:
    """A line's name as it was once made of parts with line feeds, too: another line could have the same one."""
    return _name("\n".join([report, *map(str, about)]))


def _name(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]
