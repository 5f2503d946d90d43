"""What a report line's rule limited its key to: the rule's number, or that of the override that was in force.

An override is known by its key, and a line names only the narrowest key of its requests, and the account. So where the
number may have been that of a user or address that is not named, or changed within the line, the line says none.
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
from ratelimits.engine.keys import BIN_SECONDS
from ratelimits.models import KeyOverride, Tombstone
from ratelimits.models.keys import COVERS, key_shard
from ratelimits.reports.periods import SECOND
from ratelimits.reports.terms import RuleBook

_CHUNK = 2000
_NEVER = 2**62
#: Kinds of key that one request may have several of, narrowest first: the ledger names the first of them.
_NARROWEST = ("api_key", "user", "ip")


@dataclass(frozen=True, slots=True)
class _Override:
    """What an override said between two edits: made in `version` at `made`, to hold from `since` to `until` (µs)."""

    version: int
    next_version: int
    made: int
    since: int
    until: int
    numbers: Mapping[str, Any]

    def holds(self, at: int, version: int) -> bool:
        """Whether it is in force at a moment; what was counted under a version met all edits up to that one."""
        since = self.since if self.version <= version else max(self.since, self.made)
        return version < self.next_version and since <= at < self.until


_Overrides = Mapping[tuple[str, str], Sequence[_Override]]


class Limits:
    """Limits of groups of ledger lines; what the configuration said is read for many groups at once."""

    def __init__(self, using: str, rules: RuleBook) -> None:
        self._using = using
        self._rules = rules
        self._others_since = lru_cache(maxsize=1000)(self._others_since_uncached)
        self._shaped_by = lru_cache(maxsize=1000)(self._shaped_by_uncached)

    def of(self, groups: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        """The groups, in their order, each with its `limit`: a decimal, or "" where no one number is known."""
        rest = iter(groups)
        while chunk := list(islice(rest, _CHUNK)):
            keys = {group["key"] for group in chunk} | {f"account:{group['account']}" for group in chunk}
            overrides = _read(self._using, keys) if self._has_overrides else {}
            for group in chunk:
                yield group | {"limit": self._limit(group, overrides)}

    @cached_property
    def _has_overrides(self) -> bool:
        """Whether there ever was an override: most projects have none, and need not be asked for each account."""
        history: Any = KeyOverride.history
        return bool(history.using(self._using).exists())

    def _limit(self, group: Mapping[str, Any], overrides: _Overrides) -> str:
        text, version = self._rules.of(group["rule"], group["version"]), group["version"]
        rule = text.row
        if rule is None:
            return ""
        kind = group["key"].partition(":")[0]
        counted = kind if rule.key_kind == "key" else rule.key_kind
        own, account = (
            list(overrides.get((key, rule.name), ())) if counted in COVERS.get(key.partition(":")[0], ()) else []
            for key in (group["key"], f"account:{group['account']}")
        )
        others = _hidden(kind, counted)
        if others and self._others_since(rule.name, others) <= version:
            # That it was in force is known only of one that the line has its version from.
            hidden = self._shaped_by(rule.name, others, version)
            if len(hidden) != 1 or version in (rule.version, *(each.version for each in (*own, *account))):
                return ""
            own.extend(hidden)
        return _one(rule, group, [*own, *account])

    def _others_since_uncached(self, rule: str, kinds: tuple[str, ...]) -> int:
        """The version in which the first override for such a key was made."""
        history: Any = KeyOverride.history
        found = history.using(self._using).filter(_of_kinds(kinds), rule=rule).aggregate(first=Min("version"))
        return _NEVER if found["first"] is None else int(found["first"])

    def _shaped_by_uncached(self, rule: str, kinds: tuple[str, ...], version: int) -> Sequence[_Override]:
        """Overrides of keys that the line does not name, edited in its very version: that is where it has it from."""
        history: Any = KeyOverride.history
        ids = history.using(self._using).filter(_of_kinds(kinds), rule=rule, version=version).values_list("id")
        found = _of_history(self._using, {pk for (pk,) in ids})
        return [each for every in found.values() for each in every if each.version == version]


def _of_kinds(kinds: Iterable[str]) -> Q:
    condition = Q()
    for kind in kinds:
        condition |= Q(key__startswith=f"{kind}:")
    return condition


def _hidden(kind: str, counted: str) -> tuple[str, ...]:
    """The kinds of key whose overrides reach the count, and which requests that are counted under `kind` may have."""
    if kind not in _NARROWEST:  # anonymous usage, of many keys
        return _NARROWEST if counted in (*_NARROWEST, kind) else ()
    return tuple(each for each in _NARROWEST[_NARROWEST.index(kind) + 1 :] if counted in COVERS[each])


def _one(rule: Any, group: Mapping[str, Any], overrides: Sequence[_Override]) -> str:
    """The number that held all the time, under the overrides, the first that has a number giving it; else ""."""
    start, end, version = group["first_bin"] * SECOND, (group["last_bin"] + BIN_SECONDS) * SECOND, group["version"]
    edges = {edge for each in overrides for edge in (each.since, each.made, each.until) if start < edge < end}
    limits: dict[int, set[str]] = {}
    for at in {start, *edges}:
        held = [each for each in overrides if each.holds(at, version)]
        numbers: dict[str, Any] = {}
        for each in reversed(held):
            numbers |= each.numbers
        limits.setdefault(max((each.version for each in held), default=0), set()).add(_number(rule, numbers))
    # The line's bins begin and end around it: when an override's version was not the line's, nothing was counted.
    if version in limits and version != rule.version:
        found = limits[version]
    else:
        found = {limit for newest, those in limits.items() if newest <= version for limit in those}
    return found.pop() if len(found) == 1 else ""


def _number(rule: Any, numbers: Mapping[str, Any]) -> str:
    """The capacity, else the rate; overriding numbers that make no sense for the rule are not in force."""
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
    """All that overrides ever said of these keys, by key and rule."""
    rows = KeyOverride.objects.using(using).filter(key__in=keys)
    tombstones = Tombstone.objects.using(using).filter(
        kind="keyoverride", shard__in={key_shard(key) for key in keys}, key__in=keys
    )
    deleted = tombstones.order_by().values_list("row", flat=True)
    return _of_history(using, set(rows.order_by().values_list("pk", flat=True).union(deleted)))


def _of_history(using: str, ids: set[int]) -> _Overrides:
    found: dict[tuple[str, str], list[_Override]] = {}
    if not ids:
        return found
    history: Any = KeyOverride.history
    records = history.using(using).filter(id__in=ids).order_by("id", "version", "history_id")
    for _pk, edits in groupby(records, key=lambda record: record.id):
        states = list(edits)
        for state, later in zip(states, [*states[1:], None], strict=True):
            if state.history_type == "-":
                continue
            until = _NEVER if state.valid_until is None else instant(state.valid_until)
            override = _Override(
                version=state.version,
                next_version=_NEVER if later is None else later.version,
                made=state.since,
                since=0 if state.valid_from is None else instant(state.valid_from),
                until=until if later is None else min(until, later.since),
                numbers={
                    name: getattr(state, name) for name in KeyOverride.NUMBERS if getattr(state, name) is not None
                },
            )
            found.setdefault((state.key, state.rule), []).append(override)
    return found
