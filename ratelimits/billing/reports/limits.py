"""Find the `limit` that a report line shows: the capacity of the line's rule, or its rate if the rule has no capacity.

An override can replace both numbers. A line names the account of its requests, but only one key of these requests: the
API key. If the requests have no API key, the line names their user. If they have no user either, it names their
address. Perhaps an override for another key of the requests applied too, for example an override for the user of the
API key. If it is not clear which override applied, or if the limit changed during the span of the line, the line shows
no limit.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import groupby, islice
from typing import Any

from django.db.models import Min, Q

from ratelimits.algorithms.calendar import instant
from ratelimits.algorithms.limits import fields_of
from ratelimits.billing.reports.terms import RuleBook
from ratelimits.engine.keys import BIN_SECONDS
from ratelimits.models import KeyOverride, Tombstone
from ratelimits.models.accounts.named import NamedCustomer
from ratelimits.models.fields.view_key_texts import SOURCES
from ratelimits.models.keys import COVERS, KeyKind, key_shard
from ratelimits.usage.periods import SECOND

#: Number of groups of ledger lines whose overrides are read together.
_CHUNK = 2000
#: A number that is larger than every version and every moment.
_NEVER = 2**62
#: The kinds of keys that one request can have at the same time. The ledger stores only one key of each request: the key
#: whose kind comes first here.
_KEY_KINDS = ("api_key", "user", "ip")


@dataclass(frozen=True, slots=True)
class _Override:
    """The state of an override from one edit until the next edit. All moments are µs since 1970 UTC."""

    #: The version of the edit that made this state.
    version: int
    #: The version of the next edit; _NEVER if there is none.
    next_version: int
    #: The moment of the edit that made this state.
    edited_at: int
    #: In this state, the override is in force from `since` to `until`.
    since: int
    until: int
    #: The numbers that the override sets, by column.
    numbers: Mapping[str, Any]

    def is_in_force(self, at: int, version: int) -> bool:
        """Return whether this state of the override was in force at a moment, for usage of this version of the rules.

        Usage of `next_version` or a later version was counted after the next edit, which replaced this state. Usage of
        an older version than this state's version was perhaps counted before the edit that made this state. For such
        usage, this state was in force only from `edited_at` on.
        """
        since = self.since if self.version <= version else max(self.since, self.edited_at)
        return version < self.next_version and since <= at < self.until


#: The recorded states of overrides, by key and rule.
_Overrides = Mapping[tuple[str, str], Sequence[_Override]]


class Limits:
    """Finds the limits of groups of ledger lines. The history of overrides is read for many groups at once."""

    def __init__(self, using: str, rules: RuleBook) -> None:
        self._using = using
        self._rules = rules
        self._first_unnamed = lru_cache(maxsize=1000)(self._first_unnamed_uncached)
        self._unnamed_edits = lru_cache(maxsize=1000)(self._unnamed_edits_uncached)

    def of(self, groups: Iterable[dict[str, Any]], customer: NamedCustomer) -> Iterator[dict[str, Any]]:
        """Yield the groups of a customer in their order, each with its `limit`.

        The limit is a number as text, or "" if the limit is not clear.
        """
        unread = iter(groups)
        always = customer.only_text(0, _NEVER)  # the text of most customers, which have never had another one
        while chunk := list(islice(unread, _CHUNK)):
            keys = {group["key"] for group in chunk} | {f"account:{name.text}" for name in customer.names}
            overrides = _read(self._using, keys) if self._has_overrides else {}
            for group in chunk:
                if always is not None:
                    yield group | {"limit": self._limit(group, always, overrides)}
                    continue
                start, end = group["first_bin"] * SECOND, (group["last_bin"] + BIN_SECONDS) * SECOND
                texts = {span.text for span in customer.spans(start, end)}
                limits = {self._limit(group, text, overrides) for text in texts}
                yield group | {"limit": limits.pop() if len(limits) == 1 else ""}

    @cached_property
    def _has_overrides(self) -> bool:
        """Return whether there ever was an override. If not, as in most projects, further queries are not needed."""
        history: Any = KeyOverride.history
        return bool(history.using(self._using).exists())

    def _limit(self, group: Mapping[str, Any], account: str, overrides: _Overrides) -> str:
        """Return the limit of a group under an account text.

        `overrides` has the overrides for the keys and accounts of all groups.
        """
        version = group["version"]
        rule = self._rules.of(group["rule"], version).row
        if rule is None:
            return ""
        kind = group["key"].partition(":")[0]
        # The kinds of the keys by which the rule counted, or perhaps counted, the requests of this group. A line names
        # the API key of a request, but a rule per caller counted its user, if it had one.
        kinds = [kind if rule.key_kind == "caller" else rule.key_kind]
        if rule.key_kind == "caller" and kind == "api_key" and account != group["key"]:
            kinds.append("user")
        limits = {self._limit_by(counted_kind, kind, rule, group, account, overrides) for counted_kind in kinds}
        return limits.pop() if len(limits) == 1 else ""

    def _limit_by(
        self, counted_kind: str, kind: str, rule: Any, group: Mapping[str, Any], account: str, overrides: _Overrides
    ) -> str:
        """Return the limit of a group whose line names a key of `kind`, if the rule counted keys of `counted_kind`."""
        version = group["version"]

        # An override for a key also applies to the keys that belong to this key (see COVERS). For example, an override
        # for an account applies to the account's API keys too.
        def overrides_for(key: str) -> list[_Override]:
            covered_kinds = COVERS.get(key.partition(":")[0], ())
            return list(overrides.get((key, rule.name), ())) if counted_kind in covered_kinds else []

        for_key, for_account = overrides_for(group["key"]), overrides_for(f"account:{account}")
        unnamed_kinds = _unnamed_kinds(kind, counted_kind)
        if unnamed_kinds and self._first_unnamed(rule.name, unnamed_kinds) <= version:
            # There were overrides for keys that the line does not name. The line stores one version: the newest version
            # of the rule and of the overrides that applied. If neither the rule nor an override for a named key has
            # this version, an override for an unnamed key has it. If exactly one override for an unnamed key has it,
            # this override applied. Otherwise the limit is not known.
            unnamed = self._unnamed_edits(rule.name, unnamed_kinds, version)
            named_versions = (override.version for override in (*for_key, *for_account))
            if len(unnamed) != 1 or version in (rule.version, *named_versions):
                return ""
            for_key.extend(unnamed)
        return _single_limit(rule, group, [*for_key, *for_account])

    def _first_unnamed_uncached(self, rule: str, kinds: tuple[str, ...]) -> int:
        """Return the version of the first override of a rule for any key of these kinds; _NEVER if there is none."""
        history: Any = KeyOverride.history
        row = history.using(self._using).filter(_of_kinds(kinds), rule=rule).aggregate(first=Min("version"))
        return _NEVER if row["first"] is None else int(row["first"])

    def _unnamed_edits_uncached(self, rule: str, kinds: tuple[str, ...], version: int) -> Sequence[_Override]:
        """Return a rule's overrides for keys of these kinds, in the states that the edit with this version made."""
        history: Any = KeyOverride.history
        ids = history.using(self._using).filter(_of_kinds(kinds), rule=rule, version=version).values_list("id")
        overrides = _of_history(self._using, {pk for (pk,) in ids})
        return [override for group in overrides.values() for override in group if override.version == version]


def _of_kinds(kinds: Iterable[str]) -> Q:
    """Return the condition that a key has one of these kinds."""
    condition = Q()
    for kind in kinds:
        condition |= Q(key__startswith=f"{kind}:")
    return condition


def _unnamed_kinds(kind: str, counted_kind: str) -> tuple[str, ...]:
    """Return the kinds of keys that a line does not name, but whose overrides perhaps applied to its requests.

    The line names a key of the kind `kind`. The rule counts by keys of the kind `counted_kind`.
    """
    if counted_kind == KeyKind.VIEW_KEY:  # No line names such a key.
        return SOURCES
    if kind not in _KEY_KINDS:  # The key is ANONYMOUS_KEY: the line joins requests of many keys.
        # If the rule counts per caller, `counted_kind` is `kind`.
        return _KEY_KINDS if counted_kind in (*_KEY_KINDS, kind) else ()
    later = _KEY_KINDS[_KEY_KINDS.index(kind) + 1 :]
    return tuple(later_kind for later_kind in later if counted_kind in COVERS[later_kind])


def _single_limit(rule: Any, group: Mapping[str, Any], overrides: Sequence[_Override]) -> str:
    """Return the limit during the span of the line; "" if the limit changed in this span.

    If several overrides are in force, the first override that sets a number gives this number.
    """
    start, end, version = group["first_bin"] * SECOND, (group["last_bin"] + BIN_SECONDS) * SECOND, group["version"]
    edges = {
        edge
        for override in overrides
        for edge in (override.since, override.edited_at, override.until)
        if start < edge < end
    }
    # The limits at the edges, by the newest version among the overrides that were in force at the edge.
    limits: dict[int, set[str]] = {}
    for at in {start, *edges}:
        in_force = [override for override in overrides if override.is_in_force(at, version)]
        numbers: dict[str, Any] = {}
        for override in reversed(in_force):
            numbers |= override.numbers
        newest = max((override.version for override in in_force), default=0)
        limits.setdefault(newest, set()).add(_number(rule, numbers))
    # The line's span consists of whole bins, but perhaps the line's version was in force in only a part of the span.
    # All usage of the line is from this part. So if an override has the line's version, only its limits are used.
    if version in limits and version != rule.version:
        candidates = limits[version]
    else:
        candidates = {limit for newest, values in limits.items() if newest <= version for limit in values}
    return candidates.pop() if len(candidates) == 1 else ""


def _number(rule: Any, numbers: Mapping[str, Any]) -> str:
    """Return the capacity of a rule as text; its rate if it has no capacity.

    The numbers of an override, `numbers`, replace the rule's numbers. They are ignored if the rule cannot have them.
    """
    try:
        if not numbers.keys() <= set(fields_of(rule.algorithm)):
            numbers = {}
        elif numbers:
            rule.to_algorithm(**numbers)
    except ValueError:
        numbers = {}
    capacity, rate = numbers.get("capacity", rule.capacity), numbers.get("rate", rule.rate)
    if capacity is not None:
        return str(capacity)
    return "" if rate is None else f"{rate.normalize():f}"


def _read(using: str, keys: set[str]) -> _Overrides:
    """Return all recorded states of overrides of these keys, by key and rule."""
    rows = KeyOverride.objects.using(using).filter(key__in=keys)
    tombstones = Tombstone.objects.using(using).filter(
        kind="keyoverride", shard__in={key_shard(key) for key in keys}, key__in=keys
    )
    deleted = tombstones.order_by().values_list("row", flat=True)
    return _of_history(using, set(rows.order_by().values_list("pk", flat=True).union(deleted).order_by()))


def _of_history(using: str, ids: set[int]) -> _Overrides:
    """Return all recorded states of the overrides with these primary keys, by key and rule."""
    overrides: dict[tuple[str, str], list[_Override]] = {}
    if not ids:
        return overrides
    history: Any = KeyOverride.history
    records = history.using(using).filter(id__in=ids).order_by("id", "version", "history_id")
    for _pk, edits in groupby(records, key=lambda record: record.id):
        states = list(edits)
        for state, later in zip(states, [*states[1:], None], strict=True):
            if state.history_type == "-":
                continue  # This record says that the override was deleted.
            until = _NEVER if state.valid_until is None else instant(state.valid_until)
            override = _Override(
                version=state.version,
                next_version=_NEVER if later is None else later.version,
                edited_at=state.since,
                since=0 if state.valid_from is None else instant(state.valid_from),
                until=until if later is None else min(until, later.since),
                numbers={
                    name: getattr(state, name) for name in KeyOverride.NUMBERS if getattr(state, name) is not None
                },
            )
            overrides.setdefault((state.key, state.rule), []).append(override)
    return overrides
