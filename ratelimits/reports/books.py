"""What closings read, for many accounts in one go: a month has thousands of them, and a query for each is slow."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from functools import cache
from typing import Any

from ratelimits.models import Account, Adjustment, PeriodUsage, Report, ShardState
from ratelimits.reports import signing, witness
from ratelimits.reports.adjusting import unreported
from ratelimits.reports.gaps import Gaps
from ratelimits.reports.included import Included, included_in
from ratelimits.reports.limits import Limits
from ratelimits.reports.price_book import PriceBook
from ratelimits.reports.terms import RuleBook, Terms, TermsBook
from ratelimits.reports.unknown import KeyAndMeter, Unknown


class Books:
    """The totals, reports, adjustments and terms of some accounts, each read once.

    Made within the transaction that closes, after the shards were locked.
    """

    def __init__(self, using: str, accounts: list[str], states: Mapping[int, ShardState]) -> None:
        self.using = using
        self.states = states
        self.rules = RuleBook(using)
        self.limits = Limits(using, self.rules)
        self.prices = PriceBook(using)
        self._accounts = accounts
        about: dict[str, Any] = {"account__in": accounts}
        self._usage = _by_account(PeriodUsage.objects.using(using).filter(**about))
        self._reports = _by_account(Report.objects.using(using).filter(**about).order_by("pk"))
        self._adjustments = _by_account(unreported(using, **about))
        # Accounts whose periods lie alike share what was read for the first of them.
        self._names = cache(self._read_names)
        self._terms = cache(self._read_terms)
        self._included = cache(lambda start, end: included_in(using, accounts, start, end))
        self._gaps = cache(lambda start, end: Gaps.between(using, start, end))
        self._unknown = cache(lambda start, end: Unknown(using, start, end, accounts))
        self._compared = cache(lambda start, end: witness.compare_all(using, accounts, start, end))
        self._heads = cache(lambda chain: signing.chain_head(dict(chain), using))

    def usage(self, account: str) -> list[PeriodUsage]:
        """Return the running totals of an account."""
        return self._usage[account]

    def reports(self, account: str) -> list[Report]:
        """Return an account's reports, oldest first."""
        return self._reports[account]

    def adjustments(self, account: str) -> list[Adjustment]:
        """Return the adjustments of an account that no report has yet."""
        return self._adjustments[account]

    def account_name(self, account: str) -> str:
        """Return what an account is called now; "" if it has no row."""
        return self._names().get(account, "")

    def _read_names(self) -> dict[str, str]:
        rows = Account.objects.using(self.using).filter(identifier__in=self._accounts)
        return dict(rows.values_list("identifier", "name"))

    def terms(self, account: str, at: int | None) -> Terms:
        """Return an account's terms at a moment in µs since 1970 UTC, or as they are now."""
        return self._terms(at)[account]

    def _read_terms(self, at: int | None) -> dict[str, Terms]:
        return TermsBook(self.using, at).of(self._accounts)

    def included(self, account: str, start: int, end: int) -> Included:
        """Return what the billing period between these moments (µs since 1970 UTC) includes for an account."""
        return self._included(start, end)[account]

    def unknown(self, account: str, start: int, end: int) -> Any:
        """Return the lost replies of an account in a billing period, by key and meter."""
        found: Mapping[KeyAndMeter, int] = self._unknown(start, end).of(account, start, end)
        return found

    def gaps(self, account: str, shards: list[int], start: int, end: int) -> str:
        """Return what a report of the account prints of the gaps in its period."""
        gaps = self._gaps(start, end)
        texts = [gaps.text(shard, account, start, end) for shard in shards]
        texts.append(witness.text(self._compared(start, end)[account]))
        return "; ".join(dict.fromkeys(text for text in texts if text))

    def chain_head(self, chain: Mapping[str, int]) -> str:
        """Return the digest of the ledger's chains at these positions. Raises signing.BrokenChainError."""
        return self._heads(tuple(chain.items()))


def _by_account(rows: Any) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = defaultdict(list)
    for row in rows:
        found[row.account].append(row)
    return found
