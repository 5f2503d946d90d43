"""Read the data of many customers together, to close their periods. A query for each customer would be slow."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any

from ratelimits.algorithms.billing_periods import Period, Span, Timeline
from ratelimits.billing.models import Adjustment, Report
from ratelimits.billing.reports import cross_check, signing
from ratelimits.billing.reports.adjusting import unreported
from ratelimits.billing.reports.build import Group, between, grouped, of_customer, of_period
from ratelimits.billing.reports.closing.ahead import GroupsAhead, SpanCache
from ratelimits.billing.reports.gaps import Gaps
from ratelimits.billing.reports.included import Included, IncludedBook
from ratelimits.billing.reports.limits import Limits
from ratelimits.billing.reports.lost_replies import KeyAndMeter, LostReplies
from ratelimits.billing.reports.terms import AccountTerms, RuleBook
from ratelimits.billing.reports.terms.price_book import PriceBook
from ratelimits.models.accounts.named import NamedCustomer
from ratelimits.usage.models import PeriodUsage, ShardState
from ratelimits.usage.periods import SECOND


class ClosingData:
    """The totals, reports, adjustments and terms (plan, time zone and billing anchor) of some customers.

    All of these are read for all the customers together, and only once. `states` has the row of each shard, by shard.
    With `rules`, rules that it has are not read again: a version of a rule never changes.

    To close periods, make this object in the transaction that closes them, after the customers' shards are locked.
    """

    def __init__(
        self,
        using: str,
        customers: Sequence[NamedCustomer],
        states: Mapping[int, ShardState],
        rules: RuleBook | None = None,
    ) -> None:
        self.using = using
        self.states = states
        self.rules = RuleBook(using) if rules is None else rules
        #: Adds to each group the limit that its report line shows.
        self.limits = Limits(using, self.rules)
        self.prices = PriceBook(using)
        self.customers = customers
        texts = sorted({name.text for customer in customers for name in customer.names})
        tokens = {customer.pk: customer.token for customer in customers if customer.pk is not None}
        # With `customer__in`, Django would prepare each value as a relation, which is slow.
        filters: dict[str, Any] = {"customer__pk__in": list(tokens)}
        self._usage = _by_token(PeriodUsage.objects.using(using).filter(**filters), tokens)
        # The column "gaps" is deferred, because its texts can be long and are rarely needed.
        reports = (
            Report.objects.using(using).filter(customer__token__in=list(tokens.values())).defer("gaps").order_by("pk")
        )
        self._reports = _by_token(reports)
        self._adjustments = _by_token(unreported(using, **filters), tokens)
        # The data of a `cache` or a `SpanCache` are read only when they are needed.
        self._terms = AccountTerms(using, customers)
        self._included = cache(IncludedBook(self._terms).of)
        self._gaps = SpanCache(lambda start, end: Gaps.between(using, start, end, shards=[*states], texts=texts))
        self._lost_replies = SpanCache(lambda start, end: LostReplies(using, start, end, texts))
        #: The key is the start and the end of a billing period. The value has the comparisons by token.
        self._compared: dict[tuple[int, int], dict[str, list[cross_check.Comparison]]] = defaultdict(dict)
        self._groups_ahead = cache(lambda chain: GroupsAhead(using, self._unreported(), dict(chain)))
        #: Returns the digest of the last tallied batch of each shard.
        self._digests = cache(
            lambda: signing.digests_at(((shard, row.tallied) for shard, row in states.items()), using)
        )
        #: Returns one digest for several chains.
        self._heads = cache(lambda chain: signing.joined_head(dict(chain), self._digests(), using))

    def usage(self, customer: NamedCustomer) -> list[PeriodUsage]:
        """Return the usage totals of a customer."""
        return self._usage[customer.token]

    def usage_on(self, report: Report) -> list[PeriodUsage]:
        """Return the usage totals that a report contains."""
        rows = self._usage[report.customer_id]
        return [row for row in rows if str(row.period) in report.since and str(row.shard) in report.chain]

    def reports(self, customer: NamedCustomer) -> list[Report]:
        """Return a customer's reports, oldest first."""
        return self._reports[customer.token]

    def adjustments(self, customer: NamedCustomer) -> list[Adjustment]:
        """Return the adjustments of a customer that are not on a report yet."""
        return self._adjustments[customer.token]

    def account_name(self, customer: NamedCustomer) -> str:
        """Return the current name of a customer's account; "" if it has no row."""
        return self._terms.accounts.account_name(customer)

    def timeline(self, customer: NamedCustomer) -> Timeline:
        """Return the billing periods of a customer."""
        return self._terms.accounts.timeline(customer)

    def included(self, customer: NamedCustomer, period: Period) -> Included:
        """Return the included quantities of a customer's billing period."""
        return self._included(customer, period.start, period.end)

    def lost_replies(self, customer: NamedCustomer, start: int, end: int) -> Counter[KeyAndMeter]:
        """Return the lost replies of a customer in a billing period, by key and meter."""
        return self._lost_replies.of(start, end).of(customer, start, end)

    def gaps(self, customer: NamedCustomer, shards: list[int], start: int, end: int) -> str:
        """Return the text about gaps for a report of the customer and period.

        It also names the meters for which processes counted more requests than the ledger has.
        """
        texts = [self._gaps.of(start, end).text(shards, customer, start, end)]
        texts.append(cross_check.text(self._comparisons(customer, start, end)))
        return "; ".join(filter(None, texts))

    def _comparisons(self, customer: NamedCustomer, start: int, end: int) -> list[cross_check.Comparison]:
        compared = self._compared[start, end]
        if customer.token not in compared:
            # The caller needs the other customers next. So make the comparisons of all that have usage in this period.
            usage = {
                other: rows
                for other in self.customers
                if (rows := self._usage[other.token]) and any(row.period * SECOND == start for row in rows)
            }
            usage[customer] = self._usage[customer.token]
            compared |= cross_check.compare_all(self.using, usage, start, end)
        return compared[customer.token]

    def groups(
        self, customer: NamedCustomer, period: Period, since: Mapping[str, int], chain: Mapping[str, int]
    ) -> Iterable[Group]:
        """Return the groups of a customer's ledger lines in a billing period.

        Use only lines of batches after the positions `since`, up to the positions `chain`.
        """
        span, text = (period.start, period.end), customer.only_text(period.start, period.end)
        groups: Iterable[Group] | None = None
        if text is not None and not since:  # Otherwise GroupsAhead does not have the groups.
            groups = self._groups_ahead(tuple(chain.items())).of(text, span)
        if groups is None:
            groups = grouped(of_customer(customer, *span) & between(since, chain), self.using)
        return of_period(groups, period.start)

    def _unreported(self) -> dict[str, set[Span]]:
        """Return, by account text, the spans of the billing periods with usage that no report contains.

        Leave out periods in which the customer had several texts.
        """
        spans: dict[str, set[Span]] = defaultdict(set)
        for customer in self.customers:
            rows = self._usage[customer.token]
            reported = {row.period for row in rows if row.covered is not None}
            for start, end in {(row.period, row.period_end) for row in rows if row.period not in reported}:
                text = customer.only_text(start * SECOND, end * SECOND)
                if text is not None:
                    spans[text].add((start * SECOND, end * SECOND))
        return spans

    def chain_head(self, chain: Mapping[str, int]) -> str:
        """Return one digest for the ledger's chains up to these positions.

        Each position must be the position of the last tallied batch of its shard.

        Raise signing.BrokenChainError if a batch is missing.
        """
        return self._heads(tuple(chain.items()))


def _by_token(rows: Any, tokens: Mapping[int, str] | None = None) -> dict[str, list[Any]]:
    """Return the rows in lists, by the token of their customer. A customer without rows has an empty list.

    `tokens` has the tokens by primary key, if the rows do not have the token itself.
    """
    by_token: dict[str, list[Any]] = defaultdict(list)
    for row in rows:
        by_token[row.customer_id if tokens is None else tokens[row.customer_id]].append(row)
    return by_token
