"""What the count of usage adds: facts of the status page about the ledger and its worker, and keys with usage."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from datetime import datetime, timedelta
from typing import Any

from django.db.models import Count, Max, Min, QuerySet, Sum
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from ratelimits import moments
from ratelimits.conf import conf
from ratelimits.doctor.properties import append_only
from ratelimits.moments import when
from ratelimits.status.additions import Additions, UsedKeys, WorkerTask, registered
from ratelimits.status.fact import Fact, Level
from ratelimits.status.keys import MAX_KEYS, USED_DAYS
from ratelimits.status.redis_state import RedisState, hidden, sentences, unknown
from ratelimits.usage.models import (
    AlertDelivery,
    DurabilityGap,
    GapKind,
    KeyTotal,
    Line,
    PeriodUsage,
    ProcessTotal,
    QuarantinedBatch,
    ShardState,
    TaskRun,
)
from ratelimits.usage.models.totals import DAY, newest_days
from ratelimits.usage.status.refusals import last_refusals, requests_of

#: If a task has not succeeded for this number of its intervals, its level is amber.
_AMBER_INTERVALS = 3
#: If a task has not succeeded for this number of its intervals, its level is red.
_RED_INTERVALS = 10
#: If an interval is shorter than this number of seconds, this number replaces it: a task can take that long.
_MIN_INTERVAL = 20
#: Gaps and failures that are older than this are not shown.
_SHOWN_AGE = timedelta(days=30)
#: A gap that is younger than this makes the level amber.
_AMBER_GAP_AGE = timedelta(hours=24)
#: Maximum number of rows that are counted, because it takes long to count many rows.
_MAX_COUNT = 1_000
#: If more than this number of sealed batches wait in each shard, on average, the level is amber.
_AMBER_WAITING = 10
#: The kinds of process totals that count requests without a decision of Redis.
_UNDECIDED = ("unmetered", "unanswered", "undecided")


def _facts(using: str, now: float, has_billing_rule: bool) -> list[Fact]:
    found = [_quarantine(using), _full(using), _watermark(using, has_billing_rule, now), _gaps(using)]
    return [*found, _identities(using, now), _alerts(using), *_tasks(using, has_billing_rule)]


def _redis_facts(redis: RedisState, has_billing_rule: bool) -> list[Fact]:
    return [_aof(redis, has_billing_rule), *_batches(redis)]


def _watermark(using: str, has_billing_rule: bool, now: float) -> Fact:
    title, shards = _("Ledger complete until"), conf.SHARDS
    rows = ShardState.objects.using(using).filter(shard__lt=shards)
    totals = rows.aggregate(Count("pk"), Min("watermark"), Max("watermark"), Max("ahead"))
    # In microseconds since 1970 UTC. A shard without a row has no watermark yet.
    oldest = (totals["watermark__min"] or 0) if totals["pk__count"] >= shards else 0
    if totals["ahead__max"]:
        word = _("clock ahead by %(seconds)s s") % {"seconds": f"{totals['ahead__max'] // 1_000_000:,}"}
        hint = _("Correct the clock of the Redis server or of the worker: no billing period is closed meanwhile.")
        return Fact("watermark", title, Level.RED, word, hint, "shardstate")
    if not oldest:
        level = Level.AMBER if has_billing_rule else Level.UNKNOWN
        hint = _worker_hint() if totals["watermark__max"] else nothing_drained()
        return Fact("watermark", title, level, _("never"), hint, "shardstate")
    age = now - oldest / 1_000_000
    level = _level_of_age(age, conf.SEAL_INTERVAL)
    detail = when(oldest) if level is Level.GREEN else f"{when(oldest)}. {_worker_hint()}"
    return Fact("watermark", title, level, ago(age), detail, "shardstate")


def _worker_hint() -> str:
    return _(
        "Is a worker running that seals and drains, or does cron run ratelimits_seal and ratelimits_drain, and is"
        " anything in quarantine?"
    )


def _level_of_age(age: float, interval: float) -> Level:
    """Return the level of a task that succeeded `age` seconds ago, or of a watermark of this age.

    `interval` is the interval of the task, or of the task that advances the watermark, in seconds.
    """
    interval = max(interval, _MIN_INTERVAL)
    if age <= _AMBER_INTERVALS * interval:
        return Level.GREEN
    return Level.AMBER if age <= _RED_INTERVALS * interval else Level.RED


def ago(seconds: float) -> str:
    """Return a text such as "3 h ago" for a number of seconds.

    The unit is days from 2 days on, hours from 2 hours on, and minutes from 2 minutes on. Below this, it is seconds.
    """
    for unit, text in ((86_400, _("%(n)s d ago")), (3_600, _("%(n)s h ago")), (60, _("%(n)s min ago"))):
        if seconds >= 2 * unit:
            return text % {"n": f"{seconds // unit:,.0f}"}
    return _("%(n)s s ago") % {"n": f"{max(seconds, 0):.0f}"}


def _quarantine(using: str) -> Fact:
    unresolved = count(QuarantinedBatch.objects.using(using).filter(resolved_at=None))
    hint = _("No period of their shards is closed until a person accepts or discards them.") if unresolved else ""
    level = Level.RED if unresolved else Level.GREEN
    query = {"resolved_at__isempty": "1"}
    return Fact("quarantine", _("Quarantined batches"), level, count_text(unresolved), hint, "quarantinedbatch", query)


def _full(using: str) -> Fact:
    """Return the fact about totals that have reached the largest number that they can store."""
    names = sorted(set(PeriodUsage.full(using).order_by().values_list("account", flat=True)[:_MAX_COUNT]))
    if not names:
        return Fact("full", _("Full totals"), Level.GREEN, "0")
    hint = _("A period of these accounts has more usage than a total can store, and is never closed: %(accounts)s.") % {
        "accounts": ", ".join(name or _("anonymous") for name in names[:5]) + (", …" if names[5:] else "")
    }
    return Fact("full", _("Full totals"), Level.RED, f"{len(names):,}", hint, "periodusage")


def count(rows: QuerySet[Any]) -> int:
    """Return the number of rows, but at most `_MAX_COUNT` + 1."""
    return rows.order_by()[: _MAX_COUNT + 1].count()


def count_text(count: int) -> str:
    return f"{count:,}" if count <= _MAX_COUNT else _("more than %(n)s") % {"n": f"{_MAX_COUNT:,}"}


def _gaps(using: str) -> Fact:
    now = moments.now()
    # Read only the newest rows: an outage can declare a gap for each account and quarter of an hour.
    rows = DurabilityGap.objects.using(using).exclude(kind=GapKind.FENCE)
    newest = list(rows.order_by("-pk")[: _MAX_COUNT + 1])
    shown = [gap for gap in newest if gap.declared_at > now - _SHOWN_AGE]
    open_gaps = [gap for gap in shown if not (gap.recovered_at or gap.acknowledged_at or gap.harmless)]
    recent = [gap for gap in open_gaps if gap.declared_at > now - _AMBER_GAP_AGE]
    word = _("%(count)s in 30 days") % {"count": count_text(len(open_gaps))}
    hint = _("%(count)s in 24 hours: usage may be missing, and reports say so.") % {"count": len(recent)}
    if recent:
        hint += " " + _("The newest: %(gap)s. A person can acknowledge a gap.") % {"gap": recent[0]}
    else:
        notes = [gap for gap in shown if gap.harmless and gap.declared_at > now - _AMBER_GAP_AGE]
        hint = _("%(gap)s. Nothing is missing.") % {"gap": notes[0]} if notes else ""
    level = Level.AMBER if recent else Level.GREEN
    return Fact("gaps", _("Open gaps"), level, word, hint, "durabilitygap")


def _identities(using: str, now: float) -> Fact:
    since = int(now - _AMBER_GAP_AGE.total_seconds())
    rows = ProcessTotal.objects.using(using).filter(kind="unreadable", bin__gte=since).order_by()
    counts = {kind: count for kind, count in rows.values_list("key").annotate(Sum("requests")) if count}
    title = _("Users and API keys")
    if not counts:
        return Fact("identities", title, Level.GREEN, _("readable"))
    word = _("%(count)s requests in 24 hours with one that cannot be read") % {"count": f"{sum(counts.values()):,}"}
    hooks = " and ".join(f"RATELIMITS['{kind.upper()}']" for kind in sorted(counts))
    hint = _("The failure policies of the rules that need it decided. Set %(hooks)s; the log says why.") % {
        "hooks": hooks
    }
    return Fact("identities", title, Level.AMBER, word, hint)


def _alerts(using: str) -> Fact:
    failed = AlertDelivery.State.FAILED
    given_up = count(AlertDelivery.objects.using(using).filter(state=failed, due_at__gt=moments.now() - _SHOWN_AGE))
    hint = (
        _("These alerts of the last 30 days reached nobody. Their list has an action that retries them.")
        if given_up
        else ""
    )
    level, query = Level.AMBER if given_up else Level.GREEN, {"state__exact": str(failed)}
    return Fact("alerts", _("Failed alerts"), level, count_text(given_up), hint, "alertdelivery", query)


def _aof(redis: RedisState, has_billing_rule: bool) -> Fact:
    title = _("Append-only file")
    if not redis.servers:
        return unknown("aof", title)
    found = {one.name for server in redis.servers for one in append_only(server.said)}
    if loses := next((server.loses for server in redis.servers if server.loses is not None), None):
        level = Level.RED if has_billing_rule else Level.AMBER
        return Fact("aof", title, level, _("lost at a restart"), sentences(loses))
    if not all(server.said.aof_written for server in redis.servers):
        hint = _(
            "The server could not write this file. Look at its disk. Until it can write, no usage reaches the ledger."
        )
        return Fact("aof", title, Level.RED, _("not written"), hint)
    if all(server.said.aof for server in redis.servers):
        return Fact("aof", title, Level.GREEN, _("on"))
    if not any(server.said.aof is False for server in redis.servers):
        return hidden("aof", title)
    if "append-only" not in found and conf.FENCE != "none":
        hint = _("With the setting FENCE, usage does not depend on this file: %(fence)s.") % {"fence": conf.FENCE}
        return Fact("aof", title, Level.GREEN, _("off"), hint)
    level = Level.RED if has_billing_rule and found else Level.AMBER
    return Fact(
        "aof",
        title,
        level,
        _("off"),
        _("Set `appendonly yes` on the server. Otherwise a restart of the server loses usage."),
    )


def _batches(redis: RedisState) -> Iterator[Fact]:
    """Yield how many batches of usage wait in Redis."""
    if redis.servers:
        opened = sum(server.open for server in redis.servers)
        sealed = sum(server.sealed for server in redis.servers)
        yield Fact("open", _("Open batches"), Level.GREEN, f"{opened:,}", model="batch")
        too_many = sealed > _AMBER_WAITING * conf.SHARDS
        hint = _("They wait for the drain: is a worker running?") if too_many else ""
        level = Level.AMBER if too_many else Level.GREEN
        yield Fact("sealed", _("Sealed batches"), level, f"{sealed:,}", hint, "batch")
    else:
        yield unknown("open", _("Open batches"))
        yield unknown("sealed", _("Sealed batches"))


def _undecided(using: str, since: int) -> int:
    """Return how many requests failure policies have decided since this moment (s since 1970 UTC).

    A request has a total in each of its meters, so of each key the highest total counts.
    """
    rows = ProcessTotal.objects.using(using).filter(kind__in=_UNDECIDED, bin__gte=since).order_by()
    by_key = rows.values("kind", "process", "account", "key", "bin").annotate(requests_of_key=Max("requests"))
    return by_key.aggregate(total=Sum("requests_of_key"))["total"] or 0


def _tasks(using: str, has_billing_rule: bool) -> Iterator[Fact]:
    runs, now = TaskRun.objects.using(using).in_bulk(), moments.now()
    last_seen = _last_seen(runs.values())
    for task in (task for added in registered for task in added.tasks):
        run, interval = runs.get(task.name), getattr(conf, task.setting)
        if run is None and _is_not_due(runs.get(TaskRun.Task.SEAL), interval, now):
            yield Fact(task.name, str(task.title), Level.GREEN, _("not due yet"))
        else:
            yield _task(task, interval, run or TaskRun(task=task.name), now, has_billing_rule, last_seen)


def _last_seen(runs: Iterable[TaskRun]) -> datetime | None:
    """Return the newest moment at which any task ended, in any worker; None if no task has run yet."""
    ends = (moment for run in runs for moment in (run.succeeded_at, run.failed_at) if moment is not None)
    return max(ends, default=None)


def _is_not_due(seal: TaskRun | None, interval: float, now: datetime) -> bool:
    """Return whether it is too early for the first run of a task with this interval, in seconds.

    It is too early if a worker seals regularly, and its first seal was less than `interval` ago.
    """
    if seal is None or seal.succeeded_at is None:
        return False
    seals = _level_of_age((now - seal.succeeded_at).total_seconds(), conf.SEAL_INTERVAL) is Level.GREEN
    return seals and (now - seal.first_run_at).total_seconds() < interval


def _task(
    task: WorkerTask,
    interval: float,
    run: TaskRun,
    now: datetime,
    has_billing_rule: bool,
    last_seen: datetime | None,
) -> Fact:
    name, title, succeeded, failed = task.name, str(task.title), run.succeeded_at, run.failed_at
    word, level = _("never"), Level.AMBER if has_billing_rule else Level.UNKNOWN
    hint = _("Start a Celery worker with the app's beat schedule, or run ratelimits_%(task)s.") % {"task": name}
    if succeeded is not None:
        hint = _(
            "Is a worker running that has the app's beat schedule? Without Celery, let cron run ratelimits_%(task)s,"
            " and set %(setting)s to the seconds between two runs."
        ) % {"task": name, "setting": task.setting}
        age = (now - succeeded).total_seconds()
        word, level = ago(age), _level_of_age(age, interval)
    if (
        last_seen is not None
        and _level_of_age((now - last_seen).total_seconds(), conf.SEAL_INTERVAL) is not Level.GREEN
    ):
        hint = _(
            "No worker has been seen since %(moment)s UTC. Start a Celery worker with the app's beat schedule, and"
            " let a supervisor start it again whenever it ends. Without Celery, let cron run ratelimits_%(task)s."
        ) % {"moment": f"{last_seen:%Y-%m-%d %H:%M:%S}", "task": name}
    if task.note:
        hint += f" {task.note}"
    if failed is not None and (succeeded is None or failed > succeeded):
        return Fact(name, title, Level.RED, word, _("The last run failed: %(error)s") % {"error": run.error})
    detail = f"{succeeded:%Y-%m-%d %H:%M:%S} UTC" if succeeded is not None and level is Level.GREEN else hint
    return Fact(name, title, level, word, detail)


def nothing_drained() -> str:
    """Return the text that pages show before the first drain."""
    return _(
        "Nothing was drained to the ledger yet, so no usage and no refusals are known here. Start a Celery worker with"
        " beat, or run ratelimits_seal and then ratelimits_drain."
    )


def before_first_drain(using: str) -> str:
    """Return the text of `nothing_drained`; "" if a shard was drained. This makes one query."""
    was_drained = ShardState.objects.using(using).filter(watermark__gt=0).exists()
    return "" if was_drained else nothing_drained()


def _recent_totals() -> QuerySet[KeyTotal]:
    """Return the totals of the last days. They are read by day, because a key has few of these totals."""
    days = newest_days(time.time(), USED_DAYS)
    return KeyTotal.objects.using(conf.DATABASE).filter(span=DAY, start__in=days).order_by()


def _keys(text: str) -> Iterator[str]:
    keys = _recent_totals().filter(key__icontains=text).values_list("key", flat=True)
    yield from keys.distinct()[: MAX_KEYS + 1]
    yield from (f"account:{account}" for account in _accounts(text))


def _accounts(text: str) -> Iterator[str]:
    accounts = _recent_totals().filter(account__icontains=text).values_list("account", flat=True)
    yield from accounts.distinct()[: MAX_KEYS + 1]


def _keys_of(account: str, most: int) -> Iterator[str]:
    yield from _recent_totals().filter(account=account).values_list("key", flat=True).distinct()[:most]


def _accounts_of(key: str, most: int) -> Iterator[str]:
    yield from _recent_totals().filter(key=key).values_list("account", flat=True).distinct()[:most]


ADDITIONS = Additions(
    used_keys=(
        UsedKeys(
            table=KeyTotal,
            shown_with=Line,
            keys=_keys,
            accounts=_accounts,
            keys_of=_keys_of,
            accounts_of=_accounts_of,
        ),
    ),
    facts=_facts,
    redis_facts=_redis_facts,
    undecided=_undecided,
    last_refusals=last_refusals,
    requests_of=requests_of,
    tasks=(
        WorkerTask(TaskRun.Task.SEAL, gettext_lazy("Last seal"), "SEAL_INTERVAL"),
        WorkerTask(TaskRun.Task.DRAIN, gettext_lazy("Last drain"), "DRAIN_INTERVAL"),
    ),
)
