"""The cases of this app: decisions of the engine and of quota.check, with prefetched permits, refusals and blocks."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from decimal import Decimal
from typing import Any, NamedTuple

import redis

from benchmarks.support.timing import Case
from ratelimits import engine, rules
from ratelimits.algorithms.limits import Algorithm, CalendarWindow, FixedWindow, TokenBucket
from ratelimits.engine.call import Call
from ratelimits.engine.command import Command
from ratelimits.engine.counting import Count
from ratelimits.engine.decide import decide_call
from ratelimits.engine.keys import Keyspace
from ratelimits.engine.program import Term, program
from ratelimits.engine.server import Server, current_server
from ratelimits.identity import Identity
from ratelimits.models import Access, Rule
from ratelimits.models.versions import editing
from ratelimits.quota import checking as quota
from ratelimits.quota import from_memory, spending
from ratelimits.quota.deny_cache import DenyCache
from ratelimits.quota.prefetch import PrefetchedPermits
from ratelimits.rules import Selection

PER_SECOND = TokenBucket(capacity=1_000_000, rate=Decimal(100_000), period=Decimal(1))
PER_HOUR = FixedWindow(capacity=10**9, period=Decimal(3600))
PER_MONTH = CalendarWindow(capacity=10**11, calendar_unit="month")
#: The same three limits, as the fields of a rule. "second" is PER_SECOND, and so on.
_ROWS: dict[str, dict[str, Any]] = {
    "second": {"algorithm": "token_bucket", "capacity": 1_000_000, "rate": 100_000, "period": 1},
    "hour": {"algorithm": "fixed_window", "capacity": 10**9, "period": 3600},
    "month": {"algorithm": "calendar_window", "capacity": 10**11, "calendar_unit": "month"},
}
#: Maximum number of requests for which permits are prefetched.
PREFETCH = 256
#: Number of requests with prefetched permits that are timed together.
TIMED_TOGETHER = 2_000
#: Units of calendar windows.
CALENDAR = ("hour", "day", "week", "month", "year")


def someone(user: str) -> Identity:
    """Return a user with an account. Each case has its own user, because the size of a key's state affects the time."""
    return Identity(user=f"user:{user}", account=f"account:{user}")


#: A user without permits (see `exhaust`).
REFUSED = someone("43")
#: A user who is blocked.
BLOCKED = someone("44")
#: A network that is blocked.
BLOCKED_NETWORK = "198.18.0.0/16"
#: Number of blocks besides the two that apply to requests.
BLOCKS = 10_000


def row(name: str, like: str, scope: str, key_kind: str = "user", **fields: Any) -> Rule:
    """Return an unsaved rule with the limit `like` ("second", "hour" or "month"), changed by `fields`."""
    return Rule(name=name, scope=scope, key_kind=key_kind, **{**_ROWS[like], **fields})


def usual_rules(scope: str, prefix: str, *, bills: bool = False) -> list[Rule]:
    """Return three rules for users: per second, per hour and per month. With `bills`, the rule per month bills."""
    return [row(f"{prefix}-{name}", name, scope, bills=bills and name == "month") for name in _ROWS]


def ten_rules(scope: str) -> list[Rule]:
    """Return ten rules for users. `ten_limits` returns the same limits without rules."""
    rules_of_calendar = [row(f"ten-{unit}", "month", scope, calendar_unit=unit, capacity=10**11) for unit in CALENDAR]
    return [
        row("ten-second", "second", scope),
        row("ten-minute", "second", scope, rate=6_000_000, period=60),
        row("ten-quarter", "hour", scope, period=900),
        row("ten-shift", "hour", scope, period=28_800),
        row("ten-fortnight", "hour", scope, period=1_209_600),
        *rules_of_calendar,
    ]


def save_rules() -> None:
    """Save the rules of all cases in one edit. The rules of each case have their own scope.

    The scope "kinds" has rules for three kinds of keys: user, account and global.
    """
    found = [
        row("one", "second", "one"),
        *usual_rules("three", "three", bills=True),
        row("kinds-user", "second", "kinds"),
        row("kinds-account", "month", "kinds", "account", bills=True),
        row("kinds-global", "hour", "kinds", "global"),
        *ten_rules("ten"),
        row("ahead", "hour", "ahead", prefetch=PREFETCH),
        row("refused", "month", "refused", capacity=1),
        *[row(f"refused-{name}", name, "refused") for name in ("second", "hour")],
    ]
    for rule in found:
        rule.full_clean()
    with editing("default"):
        Rule.objects.bulk_create(found)


def ten_limits() -> list[tuple[str, Algorithm]]:
    """Return the names and the limits of ten rules."""
    paced = [
        ("second", PER_SECOND),
        ("minute", TokenBucket(capacity=1_000_000, rate=Decimal(6_000_000), period=Decimal(60))),
    ]
    windows = [
        (f"window{seconds}", FixedWindow(capacity=10**9, period=Decimal(seconds)))
        for seconds in (900, 28_800, 1_209_600)
    ]
    return [*paced, *windows, *((unit, CalendarWindow(capacity=10**11, calendar_unit=unit)) for unit in CALENDAR)]


def three_limits() -> list[tuple[str, Algorithm]]:
    """Return the names of three limits, and the limits: per second, per hour and per month."""
    return [("second", PER_SECOND), ("hour", PER_HOUR), ("month", PER_MONTH)]


def usage(now: int, user: str) -> engine.Usage:
    """Return the usage of a request: one meter. The rule with the id 3, at the version 7, bills it."""
    return engine.Usage(user, f"user:{user}", (engine.Meter("requests", 3, 7),))


def call_of(
    limits: Sequence[tuple[str, Algorithm]],
    now: int,
    *,
    keys: Sequence[str] = (),
    counted: bool = True,
    user: str = "42",
) -> Call:
    """Return the call that decides these limits. A limit is given as its name and its algorithm.

    `keys` has the key of each limit. If it is empty, all limits belong to the key of `user`. `counted` says whether the
    request is counted as usage.
    """
    owners = tuple(keys) or (f"user:{user}",) * len(limits)
    different = tuple(dict.fromkeys(owners))
    terms = tuple(
        Term(algorithm, name, different.index(owner), 0, rule=3, version=7)
        for (name, algorithm), owner in zip(limits, owners, strict=True)
    )
    return Call(program(terms), different, (1,), user, usage(now, user) if counted else None, in_account=("user:",))


def engine_server() -> Server:
    """Return the server for the engine's cases. No rules are published in its namespace, so no call is stale."""
    return Server(current_server().wire, Keyspace("engine", 64))


def deciding(server: Server, call: Call) -> Callable[[], object]:
    """Return a function that decides a call with a prepared command, as quota.check does."""
    command = Command(server.keyspace, call)
    return lambda: decide_call(server, call, command).allowed


class TitledCall(NamedTuple):
    """A call, and the title of its case in tables."""

    title: str
    call: Call


def calls(now: int, user: str = "42") -> dict[str, TitledCall]:
    """Return the engine's cases by name."""
    keys = (f"user:{user}", f"account:{user}", "global")
    kinds: list[tuple[str, Algorithm]] = [("user", PER_SECOND), ("account", PER_MONTH), ("global", PER_HOUR)]
    return {
        "one": TitledCall("engine, one rule", call_of([("second", PER_SECOND)], now, counted=False, user=user)),
        "three": TitledCall("engine, 3 rules on one key + metering", call_of(three_limits(), now, user=user)),
        "kinds": TitledCall("engine, user + account + global + metering", call_of(kinds, now, keys=keys, user=user)),
        "ten": TitledCall("engine, 10 limits + metering", call_of(ten_limits(), now, user=user)),
    }


def uncounted(now: int, name: str, user: str) -> Call:
    """Return the call `name` of `calls` without usage, so that it changes only the user's state."""
    return calls(now, user)[name].call._replace(usage=None)


def scripts() -> set[bytes]:
    """Return the scripts that the calls of `calls` need, with and without usage.

    The script also depends on the shards of the keys. So this function makes the calls of many users.
    """
    keyspace = engine_server().keyspace
    found = set()
    for user in map(str, range(1000)):
        for _title, call in calls(0, user).values():
            found |= {Command(keyspace, one).script.text for one in (call, call._replace(usage=None))}
    return found


def checking(scope: str) -> Callable[[], object]:
    """Return a function that calls quota.check."""
    identity = someone(f"42-{scope}")
    return lambda: quota.check(identity, scope, "GET").allowed


def cases(now: int) -> list[Case]:
    """Return all cases of this app. The rules must be saved."""
    server = engine_server()
    out = []
    for name in calls(now):
        title, call = calls(now, f"42-{name}")[name]
        out.append(Case(f"engine_{name}", title, "ours", deciding(server, call)))
    limit = engine.Limit("user:42", PER_SECOND, "public", version=version_in_force())
    out.append(
        Case(
            "decide",
            "engine.decide([limit]), without a prepared command",
            "ours",
            lambda: engine.decide([limit]).allowed,
        )
    )
    for scope, label in (
        ("one", "1 rule"),
        ("three", "3 rules"),
        ("kinds", "user + account + global"),
        ("ten", "10 rules"),
    ):
        out.append(Case(f"check_{scope}", f"quota.check, {label} + metering", "ours", checking(scope)))
    out += [engine_ahead(server, now), check_ahead(), engine_refusal(), check_refusal(), *blocked_cases()]
    return out


def engine_ahead(server: Server, now: int) -> Case:
    """Return the case that spends prefetched permits in the engine. If no permits are left, it prefetches again."""
    call = call_of([("hour", PER_HOUR)], now, counted=True, user="42-ahead")
    permits = PrefetchedPermits(server, call, maximum=PREFETCH, seconds=1.0)

    def spend() -> object:
        spent = permits.spend()
        if spent is not None:
            return spent
        fetch = permits.next_fetch()
        decided = decide_call(server, fetch.command.call, fetch.command)
        taken = permits.take(fetch, decided)
        assert taken is not None, "a prefetch was refused"
        decision, prefetch = taken
        spending.send(permits, prefetch)
        return decision

    return Case("engine_ahead", "engine, one rule + metering, prefetched permits", "ours", spend, inner=TIMED_TOGETHER)


def check_ahead() -> Case:
    """Return the case that spends prefetched permits in quota.check."""
    return Case(
        "check_ahead",
        "quota.check, 1 rule + metering, prefetched permits",
        "ours",
        checking("ahead"),
        inner=TIMED_TOGETHER,
    )


def exhaust(identity: Identity = REFUSED) -> None:
    """Use up the permits of the identity in the scope "refused"."""
    while quota.check(identity, "refused", "GET").allowed:
        pass


def check_refusal() -> Case:
    """Return the case that calls quota.check for a refused key. The deny cache answers most of the calls."""
    return Case(
        "check_refused",
        "quota.check, refused",
        "ours",
        lambda: not quota.check(REFUSED, "refused", "GET").allowed,
        before=exhaust,
        inner=50,
    )


def engine_refusal() -> Case:
    """Return the case that looks for a refusal in the deny cache, and does nothing else."""
    exhaust()
    answer = quota.check(REFUSED, "refused", "GET")
    assert answer.decision is not None
    cache = DenyCache()
    at_once = False  # if it were true, a request that must wait would be refused
    cache_key = (REFUSED, "refused", "GET", at_once, ("requests", 1))
    cache.keep(cache_key, answer.decision, seconds=3600.0)
    # Each request makes a new identity. So look with another object that is equal to the identity.
    equal_key = (someone("43"), *cache_key[1:])
    return Case("engine_refused", "deny cache, refused", "ours", lambda: cache.repeat(equal_key), inner=50)


def refusals_sent(count: int, commands: Callable[[], int]) -> int:
    """Refuse `count` requests. Return the number of commands that are sent meanwhile.

    `commands` returns the number of commands that the server has received so far.
    """
    exhaust()
    before = commands()
    for _ in range(count):
        assert not quota.check(REFUSED, "refused", "GET").allowed
    from_memory.sender.flush()
    return commands() - before


def save_blocks() -> None:
    """Block a key, a network and BLOCKS other targets, in one edit."""
    # One half of the other targets are networks, and the other half are users.
    others = (
        f"10.{number >> 8}.{number & 255}.0/24" if number % 2 else f"user:blocked-{number}" for number in range(BLOCKS)
    )
    targets = [str(BLOCKED.user), BLOCKED_NETWORK, *others]
    with editing("default"):
        Access.objects.bulk_create(Access(target=target, reason="benchmark") for target in targets)


def blocked_check() -> Callable[[], object]:
    """Return a function that calls quota.check, each time with the next address of the blocked network."""
    callers = itertools.cycle([Identity(address=f"ip:198.18.{host >> 8}.{host & 255}") for host in range(2**16)])
    return lambda: not quota.check(next(callers), "three", "GET").allowed


def blocked_cases() -> list[Case]:
    """Return the cases with BLOCKS other blocks: a blocked key, and a blocked network with many addresses."""
    return [
        Case(
            "check_blocked",
            "quota.check, blocked key",
            "ours",
            lambda: not quota.check(BLOCKED, "three", "GET").allowed,
            inner=50,
        ),
        Case("check_blocked_network", "quota.check, blocked network", "ours", blocked_check(), inner=50),
    ]


def blocked_sent(count: int, client: redis.Redis) -> dict[str, float]:
    """Make `count` blocked requests. Return how many commands decide them, and how many commands count them.

    Also return the time of one request in µs. It is the processor time of all threads. So it contains the work of the
    background thread, which counts the requests.
    """
    check = blocked_check()
    check()
    # A new connection sends commands of its own, such as CLIENT SETINFO. So all connections are made before the monitor
    # starts.
    from_memory.sender.flush()
    with client.client() as this_client, client.monitor() as monitor:
        began = time.process_time()
        for _ in range(count):
            assert check()
        seconds = time.process_time() - began
        from_memory.sender.flush()
        this_client.echo("the end")
        sent: list[str] = []
        while "the end" not in (one := monitor.next_command())["command"]:
            if one["client_type"] != "lua":  # a command with the type "lua" was called by a script
                sent.append(one["command"])
    counting = sum(one.startswith(f"EVALSHA {Count.script.sha.decode()}") for one in sent)
    return {"to_decide": len(sent) - counting, "to_count": counting, "us_each": round(seconds / count * 1e6, 3)}


def selected(scope: str, identity: Identity) -> Selection:
    """Return the rules that apply to the identity's requests."""
    return rules.current().select(scope, "GET", identity)


def version_in_force() -> int:
    """Return the version of the rules in this process."""
    return rules.current().version
