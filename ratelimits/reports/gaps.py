"""Find the declared gaps that a report must print. A gap is a span of time in which usage may be missing."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from datetime import datetime
from functools import lru_cache
from itertools import chain

from django.db.models import Q, QuerySet

from ratelimits.engine.keys import ANONYMOUS
from ratelimits.models import DurabilityGap, GapKind
from ratelimits.models.ledger.gaps import FSYNC_POLICIES
from ratelimits.reports.periods import iso

#: The word before the number of missing units in a gap's text, by kind of gap. A gap of the kind "unknown" is about
#: requests whose replies were lost. Perhaps the ledger has some of them, so the word is "at-most". A gap of the kind
#: "unreported" is about prefetched permits of a process that was killed. Perhaps it did not spend some of them, so the
#: word is "at-most" too. A gap of the kind "uncounted" is about refused requests, of which some are perhaps counted. A
#: gap of the kind "unmetered" is about requests that a failure policy admitted while Redis did not answer. For all
#: other kinds the word is "missing".
_UNITS = {"unknown": "at-most", "unmetered": "unmetered", "unreported": "at-most", "uncounted": "at-most"}


#: The shard of a gap (None if the gap is about all shards), and its account ("" if it is about all accounts; ANONYMOUS
#: if it is about usage without an account).
_ShardAndAccount = tuple[int | None, str]


class Gaps:
    """The gaps that overlap a span of time, read once and grouped by shard and account."""

    def __init__(self, rows: Iterable[DurabilityGap]) -> None:
        self._groups: dict[_ShardAndAccount, list[tuple[int, DurabilityGap]]] = {}
        for number, gap in enumerate(rows):
            for shard in _shards(gap):
                self._groups.setdefault((shard, gap.account), []).append((number, gap))
        # Most accounts of a shard have only the gaps of this shard. Their texts are equal, so a cache helps.
        self._text = lru_cache(maxsize=100)(self._text_of)

    @classmethod
    def between(
        cls, using: str, start: int, end: int, *, shards: Collection[int] | None = None, accounts: Collection[str] = ()
    ) -> Gaps:
        """Read the gaps that overlap the span from `start` to before `end` (µs since 1970 UTC).

        If `shards` is given, read only the gaps that are about these shards and about these `accounts`. A gap without a
        shard is about all shards, and a gap without an account is about all accounts.
        """
        rows = cls.rows(using, start, end)
        if shards is not None:
            names = {"", *(name or ANONYMOUS for name in accounts)}
            rows = rows.filter(Q(shard__in=shards) | Q(shard=None), account__in=names)
        return cls(rows)

    @staticmethod
    def rows(using: str, start: int, end: int) -> QuerySet[DurabilityGap]:
        """Return the gaps that overlap the span from `start` to before `end`. Leave out those that lost nothing.

        They are in the order in which a report prints them. The end of a gap, `until`, is its last moment.
        """
        rows = DurabilityGap.objects.using(using).filter(Q(since__lt=end), Q(until__gte=start), harmless=False)
        return rows.order_by("since", "event")

    def text(self, shard: int, account: str, start: int, end: int) -> str:
        """Return the text about gaps for a report of this account, shard and period; "" if there are no gaps."""
        keys = [(of_shard, of_account) for of_shard in (None, shard) for of_account in ("", account or ANONYMOUS)]
        return self._text(tuple(key for key in keys if key in self._groups), start, end)

    def _text_of(self, keys: tuple[_ShardAndAccount, ...], start: int, end: int) -> str:
        # The first item of each pair says in which order the gaps were read.
        gaps = sorted(chain.from_iterable(self._groups[key] for key in keys), key=lambda numbered: numbered[0])
        return "; ".join(describe(gap) for _number, gap in gaps if gap.since < end and gap.until >= start)


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
