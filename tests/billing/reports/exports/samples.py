"""Rows to export. As a script it measures an export: `python -m tests.billing.reports.exports.samples 1000 200000`."""

from __future__ import annotations

import hashlib
import os
import resource
import sys
from collections.abc import Iterable, Iterator
from decimal import Decimal
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING

from ratelimits.billing.pricing.prices import PricedPart
from ratelimits.billing.reports.rows import FINAL, Charge, Row
from ratelimits.money import times

if TYPE_CHECKING:
    from ratelimits.billing.reports.exports import Format

PRICE = Decimal("0.105")
SECOND = 1_000_000
NOVEMBER, DECEMBER = 1_793_491_200 * SECOND, 1_796_083_200 * SECOND
BIN = 900 * SECOND

ROW = Row(
    report_id="acme.20261101T000000Z",
    report_version=1,
    status=FINAL,
    line_id="0123456789abcdef0123456789abcdef",
    account="acme",
    key="api_key:1",
    meter="requests",
    unit="requests",
    charge_category="usage",
    charge_class="",
    corrects_line_id="",
    billing_period_start=NOVEMBER,
    billing_period_end=DECEMBER,
    charge_period_start=NOVEMBER + 49 * BIN,
    charge_period_end=NOVEMBER + 50 * BIN,
    timezone="UTC",
    consumed_quantity=8,
    included_quantity=5,
    overage_quantity=3,
    refunded_quantity=0,
    admitted_count=8,
    denied_count=2,
    unknown_count=0,
    limit="8",
    rule="monthly",
    rule_version=42,
    plan="pro",
    batch_range="07:12-45",
    durability_gap="",
)

#: Texts that a spreadsheet might run as a formula, or that might break an export.
AWKWARD = (
    "=1+1",
    '=HYPERLINK("http://example.com","pay")',
    "+1",
    "-1",
    "@SUM(A1)",
    "\t=1",
    "\r=1",
    "http://example.com/",
    "internal:Sheet1!A1",
    "{=1+1}",
    '<r><t>1</t></r></is></c><c r="B2"><f>1+1</f></c><c><is><r></r>',
    '</t></is></c><c r="B2"><f>1+1</f></c><c><is><t>',
    'a "quoted", text; & <b>',
    "line\nbreak",
    "another\r=1+1",
    "  spaces  ",
    "Ünïcödé 😀",
    "\x01 control",
    "_x0041_",
    "12345678901234567890",
    "TRUE",
    "2026-11-01",
)  # fmt: skip


def awkward() -> list[Row]:
    """Return rows with each awkward text in every field that people type: account, key, rule and plan."""
    return [ROW._replace(account=text, key=text, rule=text, plan=text, durability_gap=text) for text in AWKWARD]


def rows(count: int) -> Iterator[Row]:
    """Yield rows like those of a large report, all different."""
    for number in range(count):
        start = NOVEMBER + number % 2_876 * BIN
        yield ROW._replace(
            line_id=hashlib.md5(b"%d" % number).hexdigest(),
            key=f"api_key:{number}",
            charge_period_start=start,
            charge_period_end=start + 4 * BIN,
            consumed_quantity=number * 7,
            included_quantity=number * 5,
            overage_quantity=number * 2,
            admitted_count=number * 7,
            denied_count=number % 13,
            batch_range=f"{number % 64:02d}:{number}-{number + 40}",
        )


def fed(form: Format, found: Iterable[Row]) -> Iterable[Row] | Iterator[Charge]:
    """Return the rows as a format takes them: without prices, or each with the same price."""
    return map(priced, found) if form.priced else found


def priced(row: Row) -> Charge:
    """Return a row and what it costs."""
    part = PricedPart(row.overage_quantity, PRICE, times(row.overage_quantity, PRICE))
    return Charge(row, "Acme Ltd.", "EUR", (part,), part.amount, "12.00")


def measure(form: Format, count: int) -> None:
    """Export this number of rows to nowhere; print format, rows, bytes, peak memory in bytes, and seconds."""
    start = perf_counter()
    size = sum(len(chunk) for chunk in form.stream(fed(form, rows(count))))
    print(form.name, count, size, peak(), f"{perf_counter() - start:.1f}", flush=True)


def measure_each(counts: list[int]) -> None:
    """Export each of these numbers of rows, in this order, in every format; each format has its own process."""
    from ratelimits.billing.reports.exports import FORMATS

    for form in FORMATS.values():
        child = os.fork()
        if not child:
            for count in counts:
                measure(form, count)
            os._exit(0)
        if os.waitpid(child, 0)[1]:
            raise SystemExit(f"The export as {form.name} failed.")


def peak() -> int:
    """Return the peak memory of this process, in bytes."""
    status = Path("/proc/self/status")
    if status.exists():  # ru_maxrss would be the value of the parent process, if that was larger
        (line,) = (line for line in status.read_text().splitlines() if line.startswith("VmHWM:"))
        return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


if __name__ == "__main__":
    measure_each([int(count) for count in sys.argv[1:]])
