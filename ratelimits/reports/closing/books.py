"""What closings read, for many accounts in one go: a month has thousands of them, and a query for each is slow."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

from django.db.models import Q

from ratelimits.models import Account, Adjustment, PeriodUsage, Report, ShardState
from ratelimits.reports import cross_check, signing
from ratelimits.reports.adjusting import unreported
from ratelimits.reports.build import Group, between, grouped
from ratelimits.reports.closing.ahead import Around, GroupsAhead
from ratelimits.reports.gaps import Gaps
from ratelimits.reports.included import Included, IncludedBook
from ratelimits.reports.limits import Limits
from ratelimits.reports.periods import SECOND
from ratelimits.reports.terms import AccountTerms, RuleBook, Terms
from ratelimits.reports.terms.price_book import PriceBook
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
        # Gaps make long texts, of which hardly any is looked at.
        self._reports = _by_account(Report.objects.using(using).filter(**about).defer("gaps").order_by("pk"))
        self._adjustments = _by_account(unreported(using, **about))
        self._names = cache(self._read_names)
        self._terms = AccountTerms(using, accounts)
        self._included = cache(IncludedBook(self._terms).of)
        self._gaps = Around(lambda start, end: Gaps.between(using, start, end, shards=[*states], accounts=accounts))
        self._unknown = Around(lambda start, end: Unknown(using, start, end, accounts))
        self._compared: dict[tuple[int, int], dict[str, list[cross_check.Comparison]]] = defaultdict(dict)
        self._ahead = cache(lambda chain: GroupsAhead(using, self._unreported(), dict(chain)))
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
        return self._terms.at(account, at)

    def included(self, account: str, start: int, end: int) -> Included:
        """Return what the billing period between these moments (µs since 1970 UTC) includes for an account."""
        return self._included(account, start, end)

    def unknown(self, account: str, start: int, end: int) -> Any:
        """Return the lost replies of an account in a billing period, by key and meter."""
        found: Mapping[KeyAndMeter, int] = self._unknown.of(start, end).of(account, start, end)
        return found

    def gaps(self, account: str, shards: list[int], start: int, end: int) -> str:
        """Return what a report of the account prints of the gaps in its period."""
        gaps = self._gaps.of(start, end)
        texts = [gaps.text(shard, account, start, end) for shard in shards]
        texts.append(cross_check.text(self._comparisons(account, start, end)))
        return "; ".join(dict.fromkeys(text for text in texts if text))

    def _comparisons(self, account: str, start: int, end: int) -> list[cross_check.Comparison]:
        found = self._compared[start, end]
        if account not in found:
            # Accounts with usage from the same start on will ask for the same period.
            alike = {
                account,
                *(row.account for rows in self._usage.values() for row in rows if row.period * SECOND == start),
            }
            found |= cross_check.compare_all(self.using, {name: self._usage[name] for name in alike}, start, end)
        return found[account]

    def groups(self, account: str, period: int, since: Mapping[str, int], chain: Mapping[str, int]) -> Iterable[Group]:
        """Return the sums of what was counted for an account under the period that starts then (s since 1970 UTC).

        That is, in the batches after the positions `since` and up to the positions `chain`.
        """
        ahead = None if since else self._ahead(tuple(chain.items())).of(account, period)
        if ahead is not None:
            return ahead
        return grouped(Q(account=account, period=period) & between(since, chain), self.using)

    def _unreported(self) -> dict[str, set[int]]:
        """Return when the periods start (s since 1970 UTC), by account, of which no report has anything."""
        found: dict[str, set[int]] = {}
        for account in self._accounts:
            periods = {row.period for row in self._usage[account]}
            periods -= {row.period for row in self._usage[account] if row.covered is not None}
            if periods:
                found[account] = periods
        return found

    def chain_head(self, chain: Mapping[str, int]) -> str:
        """Return the digest of the ledger's chains at these positions. Raises signing.BrokenChainError."""
        return self._heads(tuple(chain.items()))


def _by_account(rows: Any) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = defaultdict(list)
    for row in rows:
        found[row.account].append(row)
    return found
