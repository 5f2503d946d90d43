"""Test that credentials may change while calls are made: no call fails, and none is sent twice."""

from __future__ import annotations

import asyncio
import importlib.util
import weakref
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import pytest
import redis

from ratelimits.engine.transport.ages import LIFETIME_OF_CREDENTIALS, follow
from ratelimits.engine.transport.connection import NotSent
from ratelimits.engine.transport.wire import Wire
from tests.support.engine.rotating import Callers, Provider, Streaming, Users
from tests.support.engine.saying import WHO, say
from tests.support.garbage import collect_garbage
from tests.support.servers import TestServers

INCREASE = say(b"INCR", b"counter")
POOLS: dict[str, dict[str, Any]] = {
    "plain": {},
    "a pool of its own": {"CONNECTION_POOL_CLASS": "tests.engine.transport.test_wire.Pool"},
}


_names = count()


@pytest.fixture
def own_url(redis_url: str, redis_client: redis.Redis) -> str:
    """Return a URL of the session's empty server. django-redis stores pools by URL, so each test has its own."""
    return f"{redis_url}?client_name=test-{next(_names)}"


@pytest.fixture(params=[Provider, Streaming])
def users(request: pytest.FixtureRequest, servers: TestServers) -> Iterator[Users]:
    made = Users([servers.redis.port], request.param())
    yield made
    made.close()


@pytest.fixture(params=POOLS)
def wire(request: pytest.FixtureRequest, opened: Callable[..., Wire], own_url: str, users: Users) -> Wire:
    kwargs = {"credential_provider": users.provider}
    return opened(own_url, CONNECTION_POOL_KWARGS=kwargs, **POOLS[request.param])


def test_a_password_changes_under_load_and_each_call_has_a_reply(wire: Wire, users: Users) -> None:
    if not isinstance(users.provider, Streaming):
        wire._pool.ages.lifetime = 0.0  # the provider tells nothing, so the age of the connections must do
    with Callers(lambda: wire.call(INCREASE, b""), lambda: wire.acall(INCREASE, b"")) as callers:
        for _ in range(3):
            users.rotate(callers.a_round)
    assert callers.errors == []
    assert wire.call(INCREASE, b"") == sum(callers.calls) + 1


def test_seal_and_drain_and_waits_have_the_new_password_too(wire: Wire, users: Users) -> None:
    if not isinstance(users.provider, Streaming):
        wire._pool.ages.lifetime = 0.0
    with Callers(lambda: (wire.client.incr("counter"), wire.pop("nothing", 0.001))) as callers:
        users.rotate(callers.a_round)
    assert callers.errors == []


def test_credentials_that_change_after_the_provider_was_asked_are_asked_for_again(
    wire: Wire, users: Users, monkeypatch: pytest.MonkeyPatch
) -> None:
    right, asked = users.provider.credentials, []

    def get_credentials() -> tuple[str, str]:
        asked.append(1)
        return right if len(asked) % 2 == 0 else (right[0], "the last password")

    async def get_credentials_async() -> tuple[str, str]:
        return get_credentials()

    monkeypatch.setattr(users.provider, "get_credentials", get_credentials)
    monkeypatch.setattr(users.provider, "get_credentials_async", get_credentials_async)
    assert wire.call(INCREASE, b"") == 1
    assert asyncio.run(wire.acall(INCREASE, b"")) == 2
    assert wire.client.incr("counter") == 3


def test_credentials_that_come_while_a_connection_is_made_are_those_of_the_next_call(
    opened: Callable[..., Wire], own_url: str, servers: TestServers
) -> None:
    """A token manager of redis-py gets its second token before it gives out its first one."""
    users = Users([servers.redis.port], Streaming())
    provider, who = users.provider, say(b"ACL", b"WHOAMI")

    class Hasty(Streaming):
        def get_credentials(self) -> tuple[str, str]:
            before = provider.credentials
            users.add()
            self.tell()
            return before

        async def get_credentials_async(self) -> tuple[str, str]:
            return self.get_credentials()

    wire = opened(own_url, CONNECTION_POOL_KWARGS={"credential_provider": Hasty()})
    assert [wire.call(who, b"") for _ in range(2)] == [b"app-1", b"app-2"]
    with asyncio.Runner() as runner:
        assert [runner.run(wire.acall(who, b"")) for _ in range(2)] == [b"app-3", b"app-4"]
    users.close()


def test_a_wrong_password_is_no_reason_to_ask_without_end(wire: Wire, users: Users) -> None:
    users.provider.credentials = ("nobody", "knows")
    with pytest.raises(NotSent):
        wire.call(INCREASE, b"")
    with pytest.raises(NotSent):
        asyncio.run(wire.acall(INCREASE, b""))


def test_connections_are_not_replaced_at_each_call(wire: Wire) -> None:
    assert wire._pool.ages.lifetime == LIFETIME_OF_CREDENTIALS
    assert wire.call(WHO, b"") == wire.call(WHO, b"")


def test_a_provider_keeps_no_connections_in_memory() -> None:
    class Some:
        def renew(self) -> None:
            raise AssertionError

    provider, some = Streaming(), Some()
    gone = weakref.ref(some)
    follow(provider, some)
    del some
    collect_garbage()
    assert gone() is None
    provider.tell()


def test_all_connections_of_a_process_hear_of_it_although_the_provider_calls_one_function() -> None:
    class Some:
        renewed = 0

        def renew(self) -> None:
            self.renewed += 1

    provider, some = Streaming(), [Some(), Some()]
    for one in some:
        follow(provider, one)
    provider.tell()
    assert [one.renewed for one in some] == [1, 1]


@pytest.mark.parametrize("is_async", [False, True])
def test_a_token_manager_of_redis_py_renews_the_connections(
    opened: Callable[..., Wire], own_url: str, servers: TestServers, is_async: bool
) -> None:
    if importlib.util.find_spec("redis.auth") is None:
        return  # before version 5.3 of redis-py there are no token managers
    from tests.support.engine.tokens import Tokens

    tokens = Tokens(servers.redis.port)
    seen: set[Any] = set()
    wire = opened(own_url, CONNECTION_POOL_KWARGS={"credential_provider": tokens})
    who = say(b"ACL", b"WHOAMI")
    with asyncio.Runner() as runner:
        try:
            while len(seen) < 3:
                seen.add(runner.run(wire.acall(who, b"")) if is_async else wire.call(who, b""))
                runner.run(asyncio.sleep(0.01))  # an async manager works only while the loop runs
            assert len(tokens.issued) >= 3
        finally:
            tokens.stop()
