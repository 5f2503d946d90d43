"""Finalise open periods that a person has chosen, exactly as a preview has shown their reports.

The preview makes the reports in a transaction, and then rolls the transaction back. So the preview shows all that the
reports will contain, also late usage of earlier periods. If the account was renamed, its names share the included
units. Then the preview shows how many of these units remain.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from time import time_ns

from django.db import InterfaceError, OperationalError

from ratelimits.conf import conf
from ratelimits.models import Report
from ratelimits.models.ledger.sums import is_overflow
from ratelimits.reports.closing.close import close_together, in_chunks
from ratelimits.reports.statements.meter_totals import MeterTotal, meter_totals

logger = logging.getLogger(__name__)

#: The account and the start (µs since 1970 UTC) of a period.
AccountAndStart = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Preview:
    """The first report of a period, with its totals. If the report was only shown, it is not in the database."""

    report: Report
    totals: list[MeterTotal]

    @property
    def subject(self) -> AccountAndStart:
        return self.report.account, self.report.period_start

    @property
    def digest(self) -> str:
        """Return a digest of what a preview shows of the report."""
        report = self.report
        about = (*self.subject, report.period_end, report.timezone, report.plan, report.line_count, report.gaps)
        # Amounts are rounded, so different prices can give the same amounts. Therefore the digest needs the prices too.
        money = (report.amounts, report.prices)
        return sha256(repr((about, money, self.totals)).encode()).hexdigest()


@dataclass(slots=True)
class Outcome:
    """The result for the chosen periods.

    written     the reports that were written
    to_confirm  the reports that were not written, because a person must look at them first. A report of the same
                account was not shown before, or would differ from what was shown
    failed      the accounts that cannot be closed; the log says why
    """

    written: list[Preview] = field(default_factory=list)
    to_confirm: list[Preview] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)

    def without_report(self, chosen: Mapping[str, Collection[int]]) -> list[AccountAndStart]:
        """Return the chosen periods that have neither a written report nor a preview.

        Such a period cannot be closed now, or it was closed before. Periods of accounts in `failed` are left out.
        """
        known = {preview.subject for preview in (*self.written, *self.to_confirm)}
        subjects = ((account, start) for account, starts in chosen.items() for start in starts)
        unknown = (subject for subject in subjects if subject not in known)
        return sorted((account, start) for account, start in unknown if account not in self.failed)


class _ChangedError(Exception):
    """Raised to roll back a transaction. `accounts` are the accounts whose reports differ from what was shown."""

    def __init__(self, accounts: Collection[str]) -> None:
        super().__init__()
        self.accounts = accounts


def finalise_chosen(
    chosen: Mapping[str, Collection[int]], shown: Mapping[AccountAndStart, str] | None = None, now: int | None = None
) -> Outcome:
    """Write the first reports of these open periods, if each report would be as its preview has shown it.

    `chosen` has the starts (µs since 1970 UTC) of periods, by account. `shown` has the digests of their previews. If a
    report of an account would differ, no report of this account is written. Without `shown` nothing is written, and
    `to_confirm` has the previews. `now` is µs since 1970 UTC, by default this machine's clock.
    """
    now = time_ns() // 1000 if now is None else now
    outcome = Outcome()
    for names in in_chunks(chosen):
        _finalise(names, chosen, shown or {}, now, outcome)
    return outcome


def _finalise(
    names: list[str],
    chosen: Mapping[str, Collection[int]],
    shown: Mapping[AccountAndStart, str],
    now: int,
    outcome: Outcome,
) -> None:
    """Finalise the chosen periods of these accounts, and add the result to `outcome`.

    If some reports would differ from what was shown, write no reports of their accounts, and try again without these
    accounts. If closing fails, finalise each half of the accounts separately: an account that fails must not stop the
    others.
    """
    using = conf.DATABASE
    previews: list[Preview] = []

    def check(reports: list[Report]) -> None:
        totals = meter_totals(using, [report.pk for report in reports])
        previews.extend(Preview(report, totals.get(report.pk, [])) for report in reports)
        changed = {preview.report.account for preview in previews if shown.get(preview.subject) != preview.digest}
        if changed:
            raise _ChangedError(changed)

    try:
        close_together(using, names, now, only=chosen, check=check)
    except _ChangedError as error:
        outcome.to_confirm += [preview for preview in previews if preview.report.account in error.accounts]
        rest = [name for name in names if name not in error.accounts]
        if rest and shown:
            _finalise(rest, chosen, shown, now, outcome)
    except Exception as error:
        if isinstance(error, OperationalError | InterfaceError) and not is_overflow(error):
            raise  # The database failed, so closing fewer accounts would not help.
        if len(names) == 1:
            outcome.failed += names
            logger.exception("Account %r cannot be closed", names[0])
            return
        for part in (names[: len(names) // 2], names[len(names) // 2 :]):
            _finalise(part, chosen, shown, now, outcome)
    else:
        outcome.written += previews
