"""Restore the counts of rules from the ledger.

Two kinds of rules need this. If Redis has perhaps lost its data, a lasting rule (`Lasting.LOST`) continues with the
usage that the ledger has for its present window. A rule that starts from the ledger (`Lasting.ALWAYS`) does the same.
Such a rule also begins with this usage at the first request of each key.

The script does not decide a request if the count of such a rule is missing, or if Redis has perhaps lost newer charges
(lua/lasting.lua). Then this module reads the ledger, and lets the script raise the count to the usage in the ledger.
If another process has raised the count before, the script does not change it. After that the request is decided.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from django.db.models import Q, QuerySet

from ratelimits import rules
from ratelimits.algorithms.base import MAX_PERMITS, MICROSECONDS
from ratelimits.algorithms.limits import Lasting
from ratelimits.conf import conf
from ratelimits.engine import NotSent, Unanswered
from ratelimits.engine.call import Call, Op
from ratelimits.engine.clock import clock
from ratelimits.engine.decide import adecide_call, decide_call
from ratelimits.engine.keys import BIN_SECONDS
from ratelimits.engine.program import Term, program
from ratelimits.engine.server import current_server
from ratelimits.identity import Identity, is_account
from ratelimits.quota.prepared import Prepared
from ratelimits.rules import Snapshot
from ratelimits.rules.selection import AppliedRule, plain_key
from ratelimits.usage.models.ledger import Line
from ratelimits.usage.models.sums import ExactSum

#: Length of a bin of usage, in µs.
_BIN = BIN_SECONDS * MICROSECONDS
#: The kinds of keys whose usage the ledger knows.
_LEDGER_KINDS = ("user:", "api_key:", "account:")


class LedgerQuery(NamedTuple):
    """The usage to read: of one meter, in one span of time, of a key or an account.

    meter          the meter
    start, end     the span, in µs since 1970 UTC
    account        only usage of this account; "" for all accounts
    account_start  if the key does not matter: only usage of the account from this moment on, in µs since 1970 UTC
    key            only usage of this user or API key; "" for all keys
    is_either      whether usage of the account counts with any key, and usage of the key with any account
    """

    meter: str
    start: int
    end: int
    account: str = ""
    key: str = ""
    is_either: bool = False
    account_start: int = 0


class _Count(NamedTuple):
    """The count of a limit that perhaps must be restored.

    `query` says which usage to read. It is None if the ledger cannot know this usage. The usage is then taken as 0.
    """

    term: Term
    query: LedgerQuery | None


def restore(call: Call, prepared: Prepared, identity: Identity, snapshot: Snapshot) -> None:
    """Raise each count of this call that must be restored (see lua/lasting.lua) to the usage in the ledger.

    Higher counts do not change.

    Raise RulesUnavailable if the ledger cannot be read, and NotSent or Unavailable if Redis cannot be asked.
    """
    counts = list(_counts(call, prepared, identity, snapshot))
    units = [0 if count.query is None else rules.query(partial(read_usage, count.query)) for count in counts]
    try:
        decide_call(current_server(), _restoring_call(call, counts, units))
    except Unanswered as error:
        # Redis has not decided the request itself yet, so it has not counted the request.
        raise NotSent(str(error), error.event) from error


async def arestore(call: Call, prepared: Prepared, identity: Identity, snapshot: Snapshot) -> None:
    """Do the same as `restore`, in async code."""
    counts = list(_counts(call, prepared, identity, snapshot))
    units = [0 if count.query is None else await rules.aquery(partial(read_usage, count.query)) for count in counts]
    try:
        await adecide_call(current_server(), _restoring_call(call, counts, units))
    except Unanswered as error:
        raise NotSent(str(error), error.event) from error


def _restoring_call(call: Call, counts: list[_Count], units: list[int]) -> Call:
    """Return the call that raises each count to at least its number of `units`."""
    # The call has only the keys of these counts, so their positions change.
    positions = sorted({count.term.key for count in counts})
    terms = [replace(count.term, key=positions.index(count.term.key), slot=slot) for slot, count in enumerate(counts)]
    keys = tuple(call.keys[position] for position in positions)
    return Call(
        program(tuple(terms)),
        keys,
        tuple(units),
        call.account,
        version=None,
        op=Op.RESTORE,
        in_account=call.in_account,
    )


def _counts(call: Call, prepared: Prepared, identity: Identity, snapshot: Snapshot) -> Iterator[_Count]:
    for rule, term in zip(prepared.rules, call.program.terms, strict=True):
        if rule.lasting:
            yield _Count(term, _query(rule, call.keys[term.key], identity, snapshot))


def _query(rule: AppliedRule, key: str, identity: Identity, snapshot: Snapshot) -> LedgerQuery | None:
    span = rule.algorithm.valid_span(clock.now())
    if span is None or not plain_key(key).startswith(_LEDGER_KINDS):
        return None  # The ledger has usage only of these kinds of keys.
    start, end = span
    if rule.lasting is not Lasting.ALWAYS:
        # The ledger counts in bins. So take the whole bin in which the rule began to count.
        start = max(start, rule.counts_since - rule.counts_since % _BIN)
    query = LedgerQuery(rule.meter, start, end)
    key = plain_key(key)
    if key != identity.account and not (identity.account and is_account(key, identity)):
        # The key has one count for all its accounts, unless the project promises that each key has one account.
        return query._replace(key=key, account=identity.account_id if conf.ONE_ACCOUNT_PER_KEY else "")
    assert identity.account is not None
    # What a former customer has used under the account's text does not count.
    account_start = max(start, snapshot.used_since(identity.account))
    query = query._replace(account=identity.account_id, account_start=account_start)
    if key == identity.account or conf.ONE_ACCOUNT_PER_KEY:
        return query
    # Usage with a user's API keys is in the ledger under the API keys. If the user is the account, count all usage of
    # the account, and also what the user has used of other accounts.
    return query._replace(key=key, is_either=True)


def read_usage(query: LedgerQuery) -> int:
    """Return the number of units that were admitted and not refunded, at least 0."""
    sums = lines_of(query).aggregate(admitted=ExactSum("admitted_units"), refunded=ExactSum("refunded_units"))
    # No capacity is larger than MAX_PERMITS. The script, which counts in doubles, needs to know no more than that.
    return min(max((sums["admitted"] or 0) - (sums["refunded"] or 0), 0), MAX_PERMITS + 1)


def lines_of(query: LedgerQuery) -> QuerySet[Line]:
    """Return the lines of the ledger that a query finds. An index finds them by the key or the account, and the bin."""
    bins = Q(bin__gte=query.start // MICROSECONDS, bin__lt=query.end // MICROSECONDS)
    of_key, of_account = Q(key=query.key) & bins, Q(account=query.account) & bins
    if query.account_start > query.start:
        of_account &= Q(bin__gte=query.account_start // MICROSECONDS)
    if query.is_either:
        subject = of_account | of_key
    elif query.key:
        subject = of_key & of_account if query.account else of_key
    else:
        subject = of_account
    return Line.objects.using(conf.DATABASE).filter(subject, meter=query.meter)
