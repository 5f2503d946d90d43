"""Find the declared gaps that a report must print. A gap is a span of time in which usage may be missing."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from datetime import datetime
from functools import lru_cache
from hashlib import sha256
from operator import itemgetter
from typing import NamedTuple

from django.db.models import Q, QuerySet

from ratelimits.engine.keys import ANONYMOUS
from ratelimits.models.accounts.named import NamedCustomer
from ratelimits.usage.models import DurabilityGap, GapKind
from ratelimits.usage.models.gaps import FSYNC_POLICIES
from ratelimits.usage.periods import iso

#: The word before the number of missing units in a gap's text, by kind of gap. A gap of the kind "unknown" is about
#: requests whose replies were lost. Perhaps the ledger has some of them, so the word is "at-most". A gap of the kind
#: "unreported" is about prefetched permits of a process that was killed. Perhaps it did not spend some of them, so the
#: word is "at-most" too. A gap of the kind "uncounted" is about refused requests, of which some are perhaps counted. A
#: gap of the kind "unmetered" is about requests that a failure policy admitted while Redis did not answer. For all
#: other kinds the word is "missing".
_UNITS = {"unknown": "at-most", "unmetered": "unmetered", "unreported": "at-most", "uncounted": "at-most"}


class _Part(NamedTuple):
    """A group of gaps, and the span (µs since 1970 UTC) in which they are about a customer."""

    group: _ShardAndAccount
    start: int
    end: int


#: The shard of a gap (None if the gap is about all shards), and its account ("" if it is about all accounts; ANONYMOUS
#: if it is about usage without an account).
_ShardAndAccount = tuple[int | None, str]


class Gaps:
    """The gaps that overlap a span of time, read once and grouped by shard and account."""

    def __init__(self, rows: Iterable[DurabilityGap]) -> None:
        self._groups: dict[_ShardAndAccount, list[tuple[int, DurabilityGap]]] = {}
        #: The gaps of periods that were closed by force, by event. Each is only about its customer and period.
        self._forced: dict[str, list[tuple[int, DurabilityGap]]] = {}
        for number, gap in enumerate(rows):
            if gap.kind == GapKind.FORCED:
                self._forced[gap.event] = [(number, gap)]
                continue
            for shard in _shards(gap):
                self._groups.setdefault((shard, gap.account), []).append((number, gap))
        # Most accounts of a shard have only the gaps of this shard. Their texts are equal, so a cache helps.
        self._cached = lru_cache(maxsize=100)(self._text_of)

    @classmethod
    def between(
        cls, using: str, start: int, end: int, *, shards: Collection[int] | None = None, texts: Collection[str] = ()
    ) -> Gaps:
        """Read the gaps that overlap the span from `start` to before `end` (µs since 1970 UTC).

        If `shards` is given, read only the gaps that are about these shards and about these account texts. A gap
        without a shard is about all shards, and a gap without an account is about all accounts.
        """
        rows = cls.rows(using, start, end)
        if shards is not None:
            names = {"", *(text or ANONYMOUS for text in texts)}
            rows = rows.filter(Q(shard__in=shards) | Q(shard=None), account__in=names)
        return cls(rows)

    @staticmethod
    def rows(using: str, start: int, end: int) -> QuerySet[DurabilityGap]:
        """Return the gaps that overlap the span from `start` to before `end`. Leave out those that lost nothing.

        They are in the order in which a report prints them. The end of a gap, `until`, is its last moment.
        """
        rows = DurabilityGap.objects.using(using).filter(Q(since__lt=end), Q(until__gte=start), harmless=False)
        return rows.order_by("since", "event")

    def text(self, shards: Collection[int], customer: NamedCustomer, start: int, end: int) -> str:
        """Return the text about gaps for a report of this customer and period; "" if there are no gaps.

        `shards` are the shards of the customer. A gap of an account is a gap of the customer whom the account named at
        that time.
        """
        in_shards = (None, *shards)
        found = [_Part((shard, ""), start, end) for shard in in_shards]
        for text, since, until in customer.spans(start, end):
            found += [_Part((shard, text or ANONYMOUS), since, until) for shard in in_shards]
        parts = tuple(part for part in found if part.group in self._groups)
        forced = forced_event(customer.token, start) if self._forced else ""
        return self._cached(parts, forced if forced in self._forced else "")

    def _text_of(self, parts: tuple[_Part, ...], forced: str) -> str:
        # The number says in which order the gaps were read.
        gaps = {
            number: gap
            for part in parts
            for number, gap in self._groups[part.group]
            if gap.since < part.end and gap.until >= part.start
        }
        gaps |= dict(self._forced.get(forced, ()))
        return "; ".join(dict.fromkeys(describe(gap) for _number, gap in sorted(gaps.items(), key=itemgetter(0))))


def forced_event(token: str, start: int) -> str:
    """Return the event of the gap of a period that was closed by force.

    `token` is the customer's token, and `start` the period's start (µs since 1970 UTC).
    """
    return f"{GapKind.FORCED}:{sha256(f'{token}:{start}'.encode()).hexdigest()}"


def _shards(gap: DurabilityGap) -> Iterable[int | None]:
    """Return the shards of a gap; None for all shards."""
    return map(int, gap.shards.strip(",").split(",")) if gap.shards else [gap.shard]


def describe(gap: DurabilityGap) -> str:
    """Return the text with which a report prints a gap."""
    parts = [gap.kind, f"{iso(gap.since)}/{iso(gap.until)}"]
    if gap.fsync:
        parts.append(f"{'appendfsync' if gap.fsync in FSYNC_POLICIES else 'fence'}={gap.fsync}")
    if gap.requests is not None:
        parts += [f"missing-requests={gap.requests}", f"missing-units={gap.units}"]
    elif gap.units is not None:
        parts.append(f"{_UNITS.get(gap.kind, 'missing')}={gap.units}")
    if gap.recovered_at is not None:
        parts.append("recovered")
    return " ".join(parts)


def in_words(text: str) -> list[str]:
    """Return the gaps of a report's text as people read them, in the language of the page."""
    return [_in_words(gap) for gap in text.split("; ") if gap]


def _in_words(gap: str) -> str:
    kind, _space, rest = gap.partition(" ")
    span, *facts = rest.split(" ")
    since, slash, until = span.partition("/")
    if kind not in GapKind.values or not slash:
        return gap  # a text of the cross-check
    moments = (f"{datetime.fromisoformat(moment):%Y-%m-%d %H:%M:%S}" for moment in (since, until))
    words = f"{GapKind(kind).label}: {' – '.join(moments)} UTC"
    return f"{words} ({', '.join(facts)})" if facts else words
