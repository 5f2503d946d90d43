"""Read the data of many accounts together, to close their periods. A query for each account would be slow."""

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
from ratelimits.reports.closing.ahead import GroupsAhead, SpanCache
from ratelimits.reports.gaps import Gaps
from ratelimits.reports.included import Included, IncludedBook
from ratelimits.reports.limits import Limits
from ratelimits.reports.lost_replies import KeyAndMeter, LostReplies
from ratelimits.reports.periods import SECOND
from ratelimits.reports.terms import AccountTerms, RuleBook, Terms
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

    def account_name(self, account: str) -> str:
        """Return the current name of an account; "" if it has no row."""
        return self._names().get(account, "")

    def _read_names(self) -> dict[str, str]:
        rows = Account.objects.using(self.using).filter(identifier__in=self._accounts)
        return dict(rows.values_list("identifier", "name"))

    def terms(self, account: str, at: int | None) -> Terms:
        """Return an account's terms at a moment (µs since 1970 UTC); None means now."""
        return self._terms.at(account, at)

    def included(self, account: str, start: int, end: int) -> Included:
        """Return the included quantities of an account's billing period from `start` to `end` (µs since 1970 UTC)."""
        return self._included(account, start, end)

    def lost_replies(self, account: str, start: int, end: int) -> Any:
        """Return the lost replies of an account in a billing period, by key and meter."""
        counts: Mapping[KeyAndMeter, int] = self._lost_replies.of(start, end).of(account, start, end)
        return counts

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
            # The caller needs the other accounts next. So make the comparisons of all accounts that have usage in this
            # period.
            names = {
                account,
                *(row.account for rows in self._usage.values() for row in rows if row.period * SECOND == start),
            }
            compared |= cross_check.compare_all(self.using, {name: self._usage[name] for name in names}, start, end)
        return compared[account]

    def groups(self, account: str, period: int, since: Mapping[str, int], chain: Mapping[str, int]) -> Iterable[Group]:
        """Return the groups of an account's ledger lines in the period that starts at `period` (s since 1970 UTC).

        Use only lines of batches after the positions `since`, up to the positions `chain`.
        """
        # If `since` is empty, no report contains this period. GroupsAhead has the groups of only these periods.
        groups = None if since else self._groups_ahead(tuple(chain.items())).of(account, period)
        if groups is not None:
            return groups
        return grouped(Q(account=account, period=period) & between(since, chain), self.using)

    def _unreported(self) -> dict[str, set[int]]:
        """Return, by account, the starts (s since 1970 UTC) of the periods that no report contains."""
        starts: dict[str, set[int]] = {}
        for account in self._accounts:
            periods = {row.period for row in self._usage[account]}
            periods -= {row.period for row in self._usage[account] if row.covered is not None}
            if periods:
                starts[account] = periods
        return starts

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
