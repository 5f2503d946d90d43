"""All facts of the status page, in their order. Those about Redis are in `redis_state`; floors above add others."""

from __future__ import annotations

import time
from collections.abc import Iterator

from django.db.models import Count, Q
from django.utils.translation import gettext as _

from ratelimits.conf import conf
from ratelimits.engine.keys import BIN_SECONDS
from ratelimits.engine.program import MAX_LIMITS
from ratelimits.models import ConfigVersion, KeyOverride, Rule
from ratelimits.models.validation.crowding import too_many
from ratelimits.status.additions import registered
from ratelimits.status.fact import ORDER, Fact, Level
from ratelimits.status.redis_state import RedisReading, RedisState, failure_policy, redis_facts


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
    crowding = list(_crowding(using))
    since = (int(now) // BIN_SECONDS - 1) * BIN_SECONDS  # the start of the bin before the present one
    counted = [added.undecided(using, since) for added in registered if added.undecided is not None]
    undecided = sum(counted) if counted else None
    more = [fact for added in registered for fact in added.facts(using, now, has_billing_rule)]
    redis = reading.state()
    more += (fact for added in registered for fact in added.redis_facts(redis, has_billing_rule))
    found = [
        *redis_facts(redis, has_billing_rule),
        failure_policy(redis, {policy: count for policy, count, _billing in rows}, (since, undecided)),
        _configuration(version, redis),
        *crowding,
        *more,
    ]
    return sorted(found, key=lambda fact: ORDER.index(fact.name))


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
