"""The facts of the status page about Redis: whether it answers, what it keeps, and what waits in it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from django.db.models import Max, Sum
from django.utils.translation import gettext as _

from ratelimits.conf import conf
from ratelimits.doctor.findings import ServerFinding
from ratelimits.doctor.needs import needed
from ratelimits.doctor.properties import append_only, eviction
from ratelimits.engine import memory
from ratelimits.engine.keys import BIN_SECONDS
from ratelimits.engine.transport.probing import prober
from ratelimits.models import ProcessTotal
from ratelimits.models.ledger import moment
from ratelimits.status.fact import Fact, Level
from ratelimits.status.redis_state import RedisState

#: If more than this number of sealed batches wait in each shard, on average, the level is amber.
_AMBER_WAITING = 10
#: The kinds of process totals that count requests without a decision of Redis.
_UNDECIDED = ("unmetered", "unanswered", "undecided")


def redis_facts(redis: RedisState, has_billing_rule: bool) -> Iterator[Fact]:
    """Yield the facts about the servers: whether they answer, their memory, and whether they keep what they have."""
    refuses = [one for server in redis.servers for one in server.refuses]
    if redis.answers and refuses:
        commands = sorted({one.name.partition(":")[2] for one in refuses})
        word = _("answers, but refuses %(command)s") % {"command": ", ".join(commands)}
        level = Level.RED if any(one.parts & needed() for one in refuses) else Level.AMBER
        yield Fact("redis", _("Redis"), level, word, " ".join(map(_sentences, refuses)))
    elif redis.answers:
        word = _("answers in %(ms)s ms") % {"ms": f"{redis.seconds * 1000:.1f}"}
        yield Fact("redis", _("Redis"), Level.GREEN, word)
    else:
        count = {"silent": redis.silent, "all": redis.silent + len(redis.servers)}
        is_single = count["all"] == 1
        word = _("does not answer") if is_single else _("%(silent)s of %(all)s servers do not answer") % count
        if redis.loads:
            word = _("recovering: it loads its data")
        yield Fact("redis", _("Redis"), Level.RED, word, redis.error)
    yield _memory(redis)
    yield _eviction(redis, has_billing_rule)
    yield _aof(redis, has_billing_rule)


def _sentences(found: ServerFinding) -> str:
    return f"{found.why.removesuffix('.')}. {found.mend.removesuffix('.')}."


def _hidden(name: str, title: str) -> Fact:
    hint = _("The server does not tell it. `manage.py check --database default` says which right is missing.")
    return Fact(name, title, Level.UNKNOWN, _("cannot be read"), hint)


def _unknown(name: str, title: str) -> Fact:
    return Fact(name, title, Level.UNKNOWN, _("unknown"), _("Redis does not answer."))


def _memory(redis: RedisState) -> Fact:
    title = _("Memory")
    if not redis.servers:
        return _unknown("memory", title)
    memories = [
        (server.said.memory, server.said.max_memory) for server in redis.servers if server.said.memory is not None
    ]
    if not memories:
        return _hidden("memory", title)
    # A server without a maximum counts as nearly empty: a maximum of 2**63 bytes replaces its 0.
    used_bytes, max_memory = max(memories, key=lambda each: (each[0] / (each[1] or 2**63), each[0]))
    used = f"{used_bytes / 2**20:,.1f} MiB"
    if not max_memory:
        return Fact("memory", title, Level.GREEN, _("%(used)s, no maximum") % {"used": used})
    share = used_bytes / max_memory
    starts, level, hint = memory.starts(), Level.GREEN, ""
    if share >= starts[memory.Shortage.SHORT]:
        level = Level.RED
        hint = _("All new addresses share one count. Drain the usage that waits, or raise maxmemory.")
    elif share >= starts[memory.Shortage.NEAR]:
        level = Level.AMBER
        hint = _("New addresses of a network share one count. Drain the usage that waits, or raise maxmemory.")
    maximum = f"{max_memory / 2**20:,.1f} MiB"
    word = _("%(used)s of %(most)s (%(percent)s %%)") % {"used": used, "most": maximum, "percent": f"{share * 100:.0f}"}
    return Fact("memory", title, level, word, hint)


def _eviction(redis: RedisState, has_billing_rule: bool) -> Fact:
    title = _("Eviction policy")
    if not redis.servers:
        return _unknown("eviction", title)
    found = {one.name for server in redis.servers for one in eviction(server.said)}
    if "evicts" in found:
        policies = sorted({server.said.policy for server in redis.servers if server.said.policy is not None})
        hint = _(
            "The server can drop limits, and usage that is not in the ledger yet. Set maxmemory-policy noeviction."
        )
        level = Level.RED if has_billing_rule else Level.AMBER
        return Fact("eviction", title, level, ", ".join(policies), hint)
    return _hidden("eviction", title) if found else Fact("eviction", title, Level.GREEN, "noeviction")


def _aof(redis: RedisState, has_billing_rule: bool) -> Fact:
    title = _("Append-only file")
    if not redis.servers:
        return _unknown("aof", title)
    found = {one.name for server in redis.servers for one in append_only(server.said)}
    if loses := next((server.loses for server in redis.servers if server.loses is not None), None):
        level = Level.RED if has_billing_rule else Level.AMBER
        return Fact("aof", title, level, _("lost at a restart"), _sentences(loses))
    if not all(server.said.aof_written for server in redis.servers):
        hint = _(
            "The server could not write this file. Look at its disk. Until it can write, no usage reaches the ledger."
        )
        return Fact("aof", title, Level.RED, _("not written"), hint)
    if all(server.said.aof for server in redis.servers):
        return Fact("aof", title, Level.GREEN, _("on"))
    if not any(server.said.aof is False for server in redis.servers):
        return _hidden("aof", title)
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


def undecided(using: str, now: float) -> tuple[int, int]:
    """Return a moment (s since 1970 UTC), and how many requests failure policies have decided since.

    The moment is the start of the bin before the present one. A request has a total in each of its meters, so of each
    key the highest total counts.
    """
    since = (int(now) // BIN_SECONDS - 1) * BIN_SECONDS
    rows = ProcessTotal.objects.using(using).filter(kind__in=_UNDECIDED, bin__gte=since).order_by()
    by_key = rows.values("kind", "process", "account", "key", "bin").annotate(requests_of_key=Max("requests"))
    return since, by_key.aggregate(total=Sum("requests_of_key"))["total"] or 0


def failure_policy(redis: RedisState, rule_counts: Mapping[str, int], recent: tuple[int, int]) -> Fact:
    """Return the fact about the failure policies. `rule_counts` has the number of rules of each policy.

    The policy "" means that a rule has no policy of its own. `recent` is the result of `undecided`: a server can answer
    this page and yet refuse decisions, for example because its memory is full.
    """
    title, default = _("Failure policy"), conf.FAILURE_POLICY
    policies = ", ".join(f"{policy}: {count}" for policy, count in sorted(rule_counts.items()) if policy)
    detail = _("Rules with a policy of their own: %(own)s.") % {"own": policies} if policies else ""
    if redis.answers and prober.is_active():
        hint = _("Redis answers again. This process asks it within a second; until then, the failure policy decides.")
        return Fact("failure", title, Level.AMBER, _("recovering"), hint, "rule")
    since, requests = recent
    if redis.answers and requests:
        word = _("decided %(count)s requests (%(policy)s)") % {"count": f"{requests:,}", "policy": default}
        hint = _(
            "Redis answers now. But since %(time)s UTC these requests got no decision. If their number grows, run"
            " ratelimits_doctor: it says what the server refuses."
        ) % {"time": f"{moment(since * 1_000_000):%H:%M}"}
        return Fact("failure", title, Level.AMBER, word, f"{hint} {detail}".strip(), "rule")
    if redis.answers:
        return Fact("failure", title, Level.GREEN, _("not active (%(policy)s)") % {"policy": default}, detail, "rule")
    return Fact("failure", title, Level.RED, _("active: %(policy)s") % {"policy": default}, detail, "rule")


def batches(redis: RedisState) -> Iterator[Fact]:
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
        yield _unknown("open", _("Open batches"))
        yield _unknown("sealed", _("Sealed batches"))
