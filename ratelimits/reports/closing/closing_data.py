"""Read the data of many accounts together, to close their periods. A query for each account would be slow."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

from ratelimits.algorithms.billing_periods import DatedTimeline, Period, Span
from ratelimits.models import Account, Adjustment, Customer, PeriodUsage, Report, ShardState
from ratelimits.models.customers import present
from ratelimits.reports import cross_check, signing
from ratelimits.reports.adjusting import unreported
from ratelimits.reports.build import Group, between, grouped, of_period, of_text
from ratelimits.reports.closing.ahead import GroupsAhead, SpanCache
from ratelimits.reports.gaps import Gaps
from ratelimits.reports.included import Included, IncludedBook
from ratelimits.reports.limits import Limits
from ratelimits.reports.lost_replies import KeyAndMeter, LostReplies
from ratelimits.reports.periods import SECOND
from ratelimits.reports.terms import AccountTerms, RuleBook
from ratelimits.reports.terms.price_book import PriceBook


class ClosingData:
    """The totals, reports, adjustments and terms (plan, time zone and billing anchor) of some accounts.

    All of these are read for all the accounts together, and only once. `states` has the row of each shard, by shard.

    To close periods, make this object in the transaction that closes them, after the accounts' shards are locked.
    """

    def __init__(self, using: str, accounts: list[str], states: Mapping[int, ShardState]) -> None:
        self.using = using
        self.states = states
        self.rules = RuleBook(using)
        #: Adds to each group the limit that its report line shows.
        self.limits = Limits(using, self.rules)
        self.prices = PriceBook(using)
        self._accounts = accounts
        filters: dict[str, Any] = {"account__in": accounts}
        self._usage = _by_account(PeriodUsage.objects.using(using).filter(**filters))
        # The column "gaps" is deferred, because its texts can be long and are rarely needed.
        self._reports = _by_account(Report.objects.using(using).filter(**filters).defer("gaps").order_by("pk"))
        self._adjustments = _by_account(unreported(using, **filters))
        # The data of a `cache` or a `SpanCache` are read only when they are needed.
        self._names = cache(self._read_names)
        self._customers = cache(self._read_customers)
        self._terms = AccountTerms(using, accounts)
        self._included = cache(IncludedBook(self._terms).of)
        self._gaps = SpanCache(lambda start, end: Gaps.between(using, start, end, shards=[*states], accounts=accounts))
        self._lost_replies = SpanCache(lambda start, end: LostReplies(using, start, end, accounts))
        #: The key is the start and the end of a billing period. The value has the comparisons of each account.
        self._compared: dict[tuple[int, int], dict[str, list[cross_check.Comparison]]] = defaultdict(dict)
        self._groups_ahead = cache(lambda chain: GroupsAhead(using, self._unreported(), dict(chain)))
        #: Returns the digest of the last tallied batch of each shard.
        self._digests = cache(
            lambda: signing.digests_at(((shard, row.tallied) for shard, row in states.items()), using)
        )
        #: Returns one digest for several chains.
        self._heads = cache(lambda chain: signing.joined_head(dict(chain), self._digests(), using))

    def usage(self, account: str) -> list[PeriodUsage]:
        """Return the usage totals of an account."""
        return self._usage[account]

    def reports(self, account: str) -> list[Report]:
        """Return an account's reports, oldest first."""
        return self._reports[account]

    def adjustments(self, account: str) -> list[Adjustment]:
        """Return the adjustments of an account that are not on a report yet."""
        return self._adjustments[account]

    def customer_of(self, account: str, period: Period) -> Customer:
        """Return the customer to whom a billing period of an account belongs; an unsaved one if it has none yet."""
        pk = self.timeline(account).customer_of(period)
        return self._customers()[pk] if pk else present(self.using, [account])[account]

    def account_name(self, account: str) -> str:
        """Return the current name of an account; "" if it has no row."""
        return self._names().get(account, "")

    def _read_names(self) -> dict[str, str]:
        rows = Account.objects.using(self.using).filter(identifier__in=self._accounts)
        return dict(rows.values_list("identifier", "name"))

    def _read_customers(self) -> dict[int, Customer]:
        pks = {pk for account in self._accounts for pk in self.timeline(account).customers}
        return Customer.objects.using(self.using).defer("salt").in_bulk(pks)

    def timeline(self, account: str) -> DatedTimeline:
        """Return the billing periods of an account."""
        return self._terms.accounts.timeline(account)

    def included(self, account: str, start: int, end: int) -> Included:
        """Return the included quantities of an account's billing period from `start` to `end` (µs since 1970 UTC)."""
        return self._included(account, start, end)

    def lost_replies(self, account: str, start: int, end: int) -> Counter[KeyAndMeter]:
        """Return the lost replies of an account in a billing period, by key and meter."""
        return self._lost_replies.of(start, end).of(account, self.timeline(account).spans(start, end))

    def gaps(self, account: str, shards: list[int], start: int, end: int) -> str:
        """Return the text about gaps for a report of the account and period.

        It also names the meters for which processes counted more requests than the ledger has.
        """
        gaps = self._gaps.of(start, end)
        texts = [gaps.text(shard, account, start, end) for shard in shards]
        texts.append(cross_check.text(self._comparisons(account, start, end)))
        return "; ".join(dict.fromkeys(text for text in texts if text))

    def _comparisons(self, account: str, start: int, end: int) -> list[cross_check.Comparison]:
        compared = self._compared[start, end]
        if account not in compared:
            spans = self.timeline(account).spans(start, end)
            if spans != [(start, end)]:
                return cross_check.compare_all(self.using, {account: self._usage[account]}, start, spans)[account]
            # The caller needs the other accounts next. So make the comparisons of all accounts that have usage in this
            # period, and no other usage of the time from its start to its end.
            names = {
                account,
                *(row.account for rows in self._usage.values() for row in rows if row.period * SECOND == start),
            }
            usage = {name: self._usage[name] for name in names if self.timeline(name).spans(start, end) == spans}
            compared |= cross_check.compare_all(self.using, usage, start, spans)
        return compared[account]

    def groups(
        self, account: str, period: Period, since: Mapping[str, int], chain: Mapping[str, int]
    ) -> Iterable[Group]:
        """Return the groups of an account's ledger lines in a billing period.

        Use only lines of batches after the positions `since`, up to the positions `chain`.
        """
        span, timeline = (period.start, period.end), self.timeline(account)
        # If `since` is empty, no report contains this period. GroupsAhead has the groups of only these periods.
        groups: Iterable[Group] | None = None if since else self._groups_ahead(tuple(chain.items())).of(account, span)
        if groups is None:
            groups = grouped(of_text(account, period, timeline) & between(since, chain), self.using)
        return of_period(groups, period.start)

    def _unreported(self) -> dict[str, set[Span]]:
        """Return, by account, the spans of the billing periods with usage that no report contains.

        Leave out account texts that have named several customers: their usage of a span can belong to two periods.
        """
        spans: dict[str, set[Span]] = {}
        for account in self._accounts:
            rows = [] if self.timeline(account).was_moved else self._usage[account]
            reported = {row.period for row in rows if row.covered is not None}
            unreported_rows = [row for row in rows if row.period not in reported]
            if unreported_rows:
                spans[account] = {(row.period * SECOND, row.period_end * SECOND) for row in unreported_rows}
        return spans

    def chain_head(self, chain: Mapping[str, int]) -> str:
        """Return one digest for the ledger's chains up to these positions.

        Each position must be the position of the last tallied batch of its shard.

        Raise signing.BrokenChainError if a batch is missing.
        """
        return self._heads(tuple(chain.items()))


def _by_account(rows: Any) -> dict[str, list[Any]]:
    """Return the rows in lists, by account. An account without rows has an empty list."""
    by_account: dict[str, list[Any]] = defaultdict(list)
    for row in rows:
        by_account[row.account].append(row)
    return by_account
