"""Finalise open periods that a person has chosen, exactly as a preview has shown their reports.

The preview makes the reports in a transaction, and then rolls the transaction back. So the preview shows all that the
reports will contain, also late usage of earlier periods.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from time import time_ns

from django.db import InterfaceError, OperationalError

from ratelimits.billing.models import Report
from ratelimits.billing.reports.closing.close import close_together, in_chunks, log_failure
from ratelimits.billing.reports.statements.meter_totals import MeterTotal, meter_totals
from ratelimits.conf import conf
from ratelimits.models.accounts.named import of_tokens
from ratelimits.usage.models.sums import is_overflow

#: The customer (its token) and the start (µs since 1970 UTC) of a period.
TokenAndStart = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Preview:
    """The first report of a period, with its totals. If the report was only shown, it is not in the database."""

    report: Report
    totals: list[MeterTotal]

    @property
    def subject(self) -> TokenAndStart:
        return self.report.customer_id, self.report.period_start

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
                customer was not shown before, or would differ from what was shown
    failed      the customers (their tokens) that cannot be closed; the log says why
    """

    written: list[Preview] = field(default_factory=list)
    to_confirm: list[Preview] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)

    def without_report(self, chosen: Mapping[str, Collection[int]]) -> list[TokenAndStart]:
        """Return the chosen periods that have neither a written report nor a preview.

        Such a period cannot be closed now, or it was closed before. Periods of customers in `failed` are left out.
        """
        known = {preview.subject for preview in (*self.written, *self.to_confirm)}
        subjects = ((token, start) for token, starts in chosen.items() for start in starts)
        unknown = (subject for subject in subjects if subject not in known)
        return sorted((token, start) for token, start in unknown if token not in self.failed)


class _ChangedError(Exception):
    """Raised to roll back a transaction. `tokens` are the customers whose reports differ from what was shown."""

    def __init__(self, tokens: Collection[str]) -> None:
        super().__init__()
        self.tokens = tokens


def finalise_chosen(
    chosen: Mapping[str, Collection[int]], shown: Mapping[TokenAndStart, str] | None = None, now: int | None = None
) -> Outcome:
    """Write the first reports of these open periods, if each report would be as its preview has shown it.

    `chosen` has the starts (µs since 1970 UTC) of periods, by token of the customer. `shown` has the digests of their
    previews. If a report of a customer would differ, no report of this customer is written. Without `shown` nothing is
    written, and `to_confirm` has the previews. `now` is µs since 1970 UTC, by default this machine's clock.
    """
    now = time_ns() // 1000 if now is None else now
    outcome = Outcome()
    tokens = {one.pk: one.token for one in of_tokens(conf.DATABASE, chosen).values() if one.pk is not None}
    only = {pk: chosen[token] for pk, token in tokens.items()}
    for pks in in_chunks(conf.DATABASE, only.keys()):
        _finalise(pks, only, shown or {}, now, outcome, tokens)
    return outcome


def _finalise(
    pks: list[int],
    only: Mapping[int, Collection[int]],
    shown: Mapping[TokenAndStart, str],
    now: int,
    outcome: Outcome,
    tokens: Mapping[int, str],
) -> None:
    """Finalise the chosen periods of these customers, and add the result to `outcome`.

    If some reports would differ from what was shown, write no reports of their customers, and try again without these
    customers. If closing fails, finalise each half of the customers separately: one that fails must not stop the
    others. `tokens` has the tokens of the customers.
    """
    using = conf.DATABASE
    previews: list[Preview] = []

    def check(reports: list[Report]) -> None:
        totals = meter_totals(using, [report.pk for report in reports])
        previews.extend(Preview(report, totals.get(report.pk, [])) for report in reports)
        changed = {preview.report.customer_id for preview in previews if shown.get(preview.subject) != preview.digest}
        if changed:
            raise _ChangedError(changed)

    try:
        close_together(using, pks, now, only=only, check=check)
    except _ChangedError as error:
        outcome.to_confirm += [preview for preview in previews if preview.report.customer_id in error.tokens]
        rest = [pk for pk in pks if tokens[pk] not in error.tokens]
        if rest and shown:
            _finalise(rest, only, shown, now, outcome, tokens)
    except Exception as error:
        if isinstance(error, OperationalError | InterfaceError) and not is_overflow(error):
            raise  # The database failed, so closing fewer customers would not help.
        if len(pks) == 1:
            outcome.failed.append(tokens[pks[0]])
            log_failure(using, pks[0], error)
            return
        for part in (pks[: len(pks) // 2], pks[len(pks) // 2 :]):
            _finalise(part, only, shown, now, outcome, tokens)
    else:
        outcome.written += previews
