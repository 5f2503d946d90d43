"""All facts of the status page, in their order. Those about Redis are in `redis_state`."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from datetime import datetime, timedelta

from django.db.models import Count, Max, Min, Q, QuerySet, Sum
from django.utils.translation import gettext as _

from ratelimits import moments
from ratelimits.conf import conf
from ratelimits.engine.program import MAX_LIMITS
from ratelimits.models import (
    AlertDelivery,
    ConfigVersion,
    DurabilityGap,
    GapKind,
    KeyOverride,
    PeriodUsage,
    ProcessTotal,
    PushDelivery,
    PushReceiver,
    QuarantinedBatch,
    Rule,
    ShardState,
    TaskRun,
)
from ratelimits.models.validation.crowding import too_many
from ratelimits.moments import when
from ratelimits.status.fact import Fact, Level
from ratelimits.status.redis_state import RedisReading, RedisState, batches, failure_policy, redis_facts, undecided

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


def facts(reading: RedisReading | None = None) -> list[Fact]:
    """Return all facts. Redis is read once, and the number of queries is fixed.

    Redis is read while the database is queried. So a server that hangs delays the result by at most TIMEOUT, and
    usually by less. A caller that queries the database before it calls this function can begin the `reading` earlier.
    """
    reading, using, now = reading or RedisReading(), conf.DATABASE, time.time()
    policies = Rule.objects.using(using).order_by().exclude(mode=Rule.Mode.OFF).values_list("on_failure")
    rows = list(policies.annotate(count=Count("pk"), billing=Count("pk", filter=Q(bills=True))))
    has_billing_rule = any(billing for _policy, _count, billing in rows)
    version, _complete = ConfigVersion.read(using)
    quarantine, full = _quarantine(using), _full(using)
    watermark, gaps = _watermark(using, has_billing_rule, now), _gaps(using)
    identities = _identities(using, now)
    crowding = list(_crowding(using))
    deliveries, tasks = list(_deliveries(using)), list(_tasks(using, has_billing_rule))
    recent = undecided(using, now)
    redis = reading.state()
    return [
        *redis_facts(redis, has_billing_rule),
        failure_policy(redis, {policy: count for policy, count, _billing in rows}, recent),
        _configuration(version, redis),
        *crowding,
        identities,
        watermark,
        *batches(redis),
        quarantine,
        full,
        gaps,
        *deliveries,
        *tasks,
    ]


def _configuration(in_database: int, redis: RedisState) -> Fact:
    title = _("Configuration")
    version = _("version %(version)s") % {"version": in_database}
    in_redis = max((server.version for server in redis.servers), default=0)
    if not redis.servers:
        hint = _("Redis does not answer, so it is not known which version is in force.")
        return Fact("configuration", title, Level.UNKNOWN, version, hint)
    # 0: no server has a version yet. A server gets the version with its first decision.
    if not in_redis or in_redis == in_database:
        return Fact("configuration", title, Level.GREEN, version)
    word = _("%(database)s in the database, %(redis)s in Redis") % {"database": in_database, "redis": in_redis}
    if in_redis < in_database:
        hint = _("Redis does not know the newest edit yet. Processes read it from the database within %(seconds)s s.")
        return Fact("configuration", title, Level.AMBER, word, hint % {"seconds": f"{conf.RELOAD_INTERVAL:g}"})
    hint = _("If the database was restored to an older state, run ratelimits_reload.")
    return Fact("configuration", title, Level.RED, word, hint)


def _crowding(using: str) -> Iterator[Fact]:
    """Yield a fact if more rules could apply to one request than a decision takes."""
    crowd = too_many(Rule.objects.using(using), KeyOverride.objects.using(using))
    if crowd is None:
        return
    word = _("%(count)s for one request, at most %(most)s are decided") % {"count": crowd.rules, "most": MAX_LIMITS}
    hint = _(
        "Scope %(scope)s. Shadow rules are left out first, then the last enforced rules by name: their failure policies"
        " answer. Switch rules off, or delete them."
    )
    hint %= {"scope": crowd.scope}
    if crowd.keys:
        hint += " " + _("Overrides of these keys switch some of the rules on: %(keys)s.") % {
            "keys": ", ".join(crowd.keys)
        }
    yield Fact("crowding", _("Rules"), Level.RED, word, hint, "rule")


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
    unresolved = _count(QuarantinedBatch.objects.using(using).filter(resolved_at=None))
    hint = _("No period of their shards is closed until a person accepts or discards them.") if unresolved else ""
    level = Level.RED if unresolved else Level.GREEN
    query = {"resolved_at__isempty": "1"}
    return Fact("quarantine", _("Quarantined batches"), level, _count_text(unresolved), hint, "quarantinedbatch", query)


def _full(using: str) -> Fact:
    """Return the fact about totals that have reached the largest number that they can store."""
    names = sorted(set(PeriodUsage.full(using).order_by().values_list("account", flat=True)[:_MAX_COUNT]))
    if not names:
        return Fact("full", _("Full totals"), Level.GREEN, "0")
    hint = _("A period of these accounts has more usage than a total can store, and is never closed: %(accounts)s.") % {
        "accounts": ", ".join(name or _("anonymous") for name in names[:5]) + (", …" if names[5:] else "")
    }
    return Fact("full", _("Full totals"), Level.RED, f"{len(names):,}", hint, "periodusage")


def _count(rows: QuerySet[AlertDelivery] | QuerySet[PushDelivery] | QuerySet[QuarantinedBatch]) -> int:
    """Return the number of rows, but at most `_MAX_COUNT` + 1."""
    return rows.order_by()[: _MAX_COUNT + 1].count()


def _count_text(count: int) -> str:
    return f"{count:,}" if count <= _MAX_COUNT else _("more than %(n)s") % {"n": f"{_MAX_COUNT:,}"}


def _gaps(using: str) -> Fact:
    now = moments.now()
    # Read only the newest rows: an outage can declare a gap for each account and quarter of an hour.
    rows = DurabilityGap.objects.using(using).exclude(kind=GapKind.FENCE)
    newest = list(rows.order_by("-pk")[: _MAX_COUNT + 1])
    shown = [gap for gap in newest if gap.declared_at > now - _SHOWN_AGE]
    open_gaps = [gap for gap in shown if not (gap.recovered_at or gap.acknowledged_at or gap.harmless)]
    recent = [gap for gap in open_gaps if gap.declared_at > now - _AMBER_GAP_AGE]
    word = _("%(count)s in 30 days") % {"count": _count_text(len(open_gaps))}
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


def _deliveries(using: str) -> Iterator[Fact]:
    failed = AlertDelivery.State.FAILED
    given_up = _count(AlertDelivery.objects.using(using).filter(state=failed, due_at__gt=moments.now() - _SHOWN_AGE))
    hint = (
        _("These alerts of the last 30 days reached nobody. Their list has an action that retries them.")
        if given_up
        else ""
    )
    level, query = Level.AMBER if given_up else Level.GREEN, {"state__exact": str(failed)}
    yield Fact("alerts", _("Failed alerts"), level, _count_text(given_up), hint, "alertdelivery", query)
    states = PushDelivery.State
    undecided = (states.REFUSED, states.UNSURE, states.EXPIRED)
    # Name each receiver, so that the database can use the index on receiver and state.
    receivers = PushReceiver.objects.using(using).values("pk")
    count = _count(PushDelivery.objects.using(using).filter(receiver__in=receivers, state__in=undecided))
    hint = _("A person has to settle them: ratelimits_push --settle.") if count else ""
    level = Level.AMBER if count else Level.GREEN
    yield Fact("push", _("Failed push deliveries"), level, _count_text(count), hint, "pushdelivery")


def _tasks(using: str, has_billing_rule: bool) -> Iterator[Fact]:
    runs, now = TaskRun.objects.using(using).in_bulk(), moments.now()
    for task, title, interval in (
        (TaskRun.Task.SEAL, _("Last seal"), conf.SEAL_INTERVAL),
        (TaskRun.Task.DRAIN, _("Last drain"), conf.DRAIN_INTERVAL),
        (TaskRun.Task.FINALISE, _("Last finalisation of all accounts"), conf.FINALISE_INTERVAL),
    ):
        run = runs.get(task)
        if run is None and _is_not_due(runs.get(TaskRun.Task.SEAL), interval, now):
            yield Fact(task, title, Level.GREEN, _("not due yet"))
        else:
            yield _task(
                task, title, interval, run or TaskRun(task=task), now, has_billing_rule, _last_seen(runs.values())
            )


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
    name: str,
    title: str,
    interval: float,
    run: TaskRun,
    now: datetime,
    has_billing_rule: bool,
    last_seen: datetime | None,
) -> Fact:
    succeeded, failed = run.succeeded_at, run.failed_at
    word, level = _("never"), Level.AMBER if has_billing_rule else Level.UNKNOWN
    hint = _("Start a Celery worker with the app's beat schedule, or run ratelimits_%(task)s.") % {"task": name}
    if succeeded is not None:
        hint = _(
            "Is a worker running that has the app's beat schedule? Without Celery, let cron run ratelimits_%(task)s,"
            " and set %(setting)s to the seconds between two runs."
        ) % {"task": name, "setting": f"{name.upper()}_INTERVAL"}
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
    if name == TaskRun.Task.FINALISE:
        hint += " " + _("What people finalise in the admin, or for one account, does not count here.")
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
