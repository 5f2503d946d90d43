"""Test that no command is lost on a connection that was dropped while it was idle, and that none is sent twice."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import redis

from ratelimits.embedded import EmbeddedServer as RunningServer
from ratelimits.engine.transport import ages
from ratelimits.engine.transport.ages import IDLE, JUST_NOW, OLDEST
from ratelimits.engine.transport.connection import NotSent, Unanswered
from ratelimits.engine.transport.wire import Wire
from tests.support.engine.askers import INCREASE, POOLS, Asker
from tests.support.engine.proxy import Proxy
from tests.support.engine.saying import COUNT, PATIENT, WHO, let_be_idle, say, script_call
from tests.support.engine.tls import TlsServer
from tests.support.eventually import until
from tests.support.snippets import snippet

#: Seconds to wait for an answer that never comes.
SOON = 0.05


class TestDroppedWithoutAWord:
    def test_a_connection_is_replaced_before_a_command_is_sent_on_it(
        self, asking: Callable[..., Asker], proxy: Proxy
    ) -> None:
        with asking(proxy.url) as ask:
            assert ask() == 1
            ask.wire._pool.ages.wait = SOON
            let_be_idle(ask.wire, 2 * IDLE)
            assert proxy.forget() == 1
            assert ask() == 2
            assert (proxy.count(b"INCR"), proxy.count(b"PING"), proxy.connections) == (2, 0, 2)

    def test_from_then_on_none_that_was_idle_as_long_is_waited_for(
        self, asking: Callable[..., Asker], proxy: Proxy, redis_client: redis.Redis
    ) -> None:
        with asking(proxy.url) as ask:
            assert ask() == 1
            ask.wire._pool.ages.wait = SOON
            let_be_idle(ask.wire, 2 * IDLE)
            proxy.forget()
            assert ask() == 2
            before = pings(redis_client)
            let_be_idle(ask.wire, OLDEST / 2)
            assert ask() == 3
            assert (proxy.connections, pings(redis_client)) == (3, before)

    def test_a_late_answer_is_not_remembered_for_ever(
        self, asking: Callable[..., Asker], proxy: Proxy, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(ages, "REMEMBERED", 0.0)
        with asking(proxy.url) as ask:
            assert ask() == 1
            ask.wire._pool.ages.wait = SOON
            let_be_idle(ask.wire, 2 * IDLE)
            proxy.forget()
            assert ask() == 2
            ask.wire._pool.ages.wait = 10
            let_be_idle(ask.wire, OLDEST / 2)
            assert (ask(), proxy.connections) == (3, 2)

    def test_a_connection_that_is_too_old_is_replaced_without_asking(
        self, asking: Callable[..., Asker], proxy: Proxy
    ) -> None:
        with asking(proxy.url) as ask:
            assert ask() == 1
            let_be_idle(ask.wire, OLDEST + IDLE)
            proxy.forget()
            assert ask() == 2
            assert (proxy.connections, proxy.count(b"PING")) == (2, 0)

    def test_one_that_still_works_is_asked_and_stays(self, asking: Callable[..., Asker], proxy: Proxy) -> None:
        with asking(proxy.url) as ask:
            first = ask(WHO)
            for number in range(1, 4):
                let_be_idle(ask.wire, 2 * IDLE)
                assert (ask(WHO), proxy.count(b"PING")) == (first, number)

    def test_the_project_says_after_how_many_seconds_the_server_is_asked(
        self, asking: Callable[..., Asker], proxy: Proxy
    ) -> None:
        with asking(proxy.url, health_check_interval=300) as ask:
            first = ask(WHO)
            let_be_idle(ask.wire, 290)
            assert (ask(WHO), proxy.count(b"PING")) == (first, 0)
            let_be_idle(ask.wire, 310)
            assert (ask(WHO) > first, proxy.count(b"PING")) == (True, 0)

    def test_a_server_that_is_away_meanwhile_was_sent_nothing_and_teaches_nothing(
        self, asking: Callable[..., Asker], proxy: Proxy
    ) -> None:
        with asking(proxy.url) as ask:
            assert ask() == 1
            ask.wire._pool.ages.wait = SOON
            let_be_idle(ask.wire, 2 * IDLE)
            proxy.forget()
            proxy.cut.set()  # no other connection can be made
            with pytest.raises(NotSent):
                ask()
            proxy.cut.clear()
            assert ask() == 2
            assert (proxy.count(b"INCR"), ask.wire._pool.ages.oldest) == (2, OLDEST)

    def test_a_user_who_may_not_send_ping_has_an_answer_too(
        self, asking: Callable[..., Asker], proxy: Proxy, redis_client: redis.Redis
    ) -> None:
        redis_client.execute_command("ACL", "SETUSER", "few", "on", ">secret", "allkeys", "+@all", "-ping")
        with asking(proxy.url.replace("redis://", "redis://few:secret@")) as ask:
            first = ask(WHO)
            let_be_idle(ask.wire, 2 * IDLE)
            assert (ask(WHO), proxy.count(b"PING")) == (first, 1)
        redis_client.execute_command("ACL", "DELUSER", "few")

    def test_the_commands_of_seal_and_drain_have_such_connections_too(
        self, opened: Callable[..., Wire], proxy: Proxy
    ) -> None:
        wire = opened(proxy.url)
        wire._pool.ages.wait = SOON
        assert wire.client.incr("counter") == 1
        let_be_idle(wire, 2 * IDLE)
        proxy.forget()
        assert wire.client.incr("counter") == 2

    def test_a_wait_for_an_element_has_one_too(
        self, opened: Callable[..., Wire], proxy: Proxy, redis_client: redis.Redis
    ) -> None:
        wire = opened(proxy.url)
        wire._pool.ages.wait = SOON
        redis_client.rpush("list", "a", "b")
        assert wire.pop("list", 1) == b"a"
        let_be_idle(wire, 2 * IDLE)
        proxy.forget()
        assert wire.pop("list", 1) == b"b"


def pings(client: redis.Redis) -> int:
    info: Any = client.info("commandstats")
    return int(info.get("cmdstat_ping", {"calls": 0})["calls"])


class TestClosedByTheServer:
    def test_nothing_is_sent_on_its_connection(
        self, asking: Callable[..., Asker], redis_url: str, redis_client: redis.Redis
    ) -> None:
        with asking(redis_url) as ask:
            first = ask(WHO)
            assert ask() == 1
            redis_client.client_kill_filter(_id=first)
            let_be_idle(ask.wire, 2 * JUST_NOW)
            # The event loop has not noticed the end yet: it did not run meanwhile.
            assert ask() == 2
            assert ask(WHO) > first

    @pytest.mark.parametrize("kind", [("plain", False), ("a parser of its own", False), ("plain", True)])
    def test_nobody_looks_at_a_connection_that_was_used_just_now(
        self, asking: Callable[..., Asker], redis_url: str, redis_client: redis.Redis
    ) -> None:
        """The look takes too long. So an end that comes at once is as one that comes after the command was sent."""
        with asking(redis_url) as ask:
            first = ask(WHO)
            assert ask() == 1
            redis_client.client_kill_filter(_id=first)
            let_be_idle(ask.wire, -PATIENT)  # the last command has just ended, however long the machine takes
            with pytest.raises(Unanswered):
                ask()
            assert redis_client.get("counter") == b"1", "not sent again"
            assert ask() == 2

    def test_a_script_that_is_missing_on_the_other_connection_is_loaded(
        self, asking: Callable[..., Asker], redis_url: str, redis_client: redis.Redis
    ) -> None:
        command = script_call(COUNT, b"1", b"counter")
        with asking(redis_url) as ask:
            assert ask(command) == 1
            redis_client.client_kill_filter(_id=ask(WHO))
            redis_client.script_flush()
            let_be_idle(ask.wire, 2 * JUST_NOW)
            assert ask(command) == 2

    def test_one_that_arrived_is_not_sent_again(
        self, asking: Callable[..., Asker], proxy: Proxy, redis_client: redis.Redis
    ) -> None:
        with asking(proxy.url) as ask:
            assert ask() == 1
            proxy.cut.set()
            with pytest.raises(Unanswered):
                ask()
            proxy.cut.clear()
            assert (redis_client.get("counter"), proxy.count(b"INCR")) == (b"2", 2)

    def test_one_that_the_server_has_begun_is_not_sent_again(
        self, asking: Callable[..., Asker], proxy: Proxy, redis_client: redis.Redis
    ) -> None:
        """Its connection ends in the same way, but the server had received all bytes."""

        def end() -> None:
            until(lambda: redis_client.info("clients")["blocked_clients"] == 1, "the server waits")
            redis_client.client_kill_filter(_id=first)

        with asking(proxy.url) as ask:
            first = ask(WHO)
            killer = threading.Thread(target=end)
            killer.start()
            try:
                with pytest.raises(Unanswered):
                    ask(say(b"BLPOP", b"nobody pushes", b"0"))
            finally:
                killer.join()
            assert proxy.count(b"BLPOP") == 1

    def test_a_server_that_closes_idle_connections_after_a_second(
        self, opened: Callable[..., Wire], own_server: RunningServer
    ) -> None:
        wire = opened(own_server.url)
        with redis.Redis(port=own_server.port) as admin, Asker(wire, True) as ask_async:
            asks = [Asker(wire, False), ask_async]
            first = {str(ask(WHO)) for ask in asks}
            admin.config_set("timeout", 1)
            until(lambda: first.isdisjoint(one["id"] for one in admin.client_list()), "the server has closed them")
            assert [ask() for ask in asks] == [1, 2]

    def test_a_server_that_wants_credentials_again_did_nothing(
        self, asking: Callable[..., Asker], own_server: RunningServer
    ) -> None:
        with redis.Redis(port=own_server.port) as admin:
            admin.config_set("requirepass", "secret")
        with asking(own_server.url.replace("redis://", "redis://:secret@")) as ask:
            assert ask() == 1
            assert ask(say(b"RESET")) in (b"RESET", "RESET")  # the connection has no user any more
            assert ask() == 2


class TestDrained:
    """A proxy that drains has sent the end to the client, and still forwards what the client sends."""

    def test_nothing_is_sent_on_a_connection_that_the_proxy_drains(
        self, asking: Callable[..., Asker], proxy: Proxy, redis_client: redis.Redis
    ) -> None:
        with asking(proxy.url) as ask:
            for number in (1, 2, 3):
                assert ask() == number
                proxy.drain()
                let_be_idle(ask.wire, 2 * JUST_NOW)
            assert (redis_client.get("counter"), proxy.count(b"INCR"), proxy.connections) == (b"3", 3, 3)

    @pytest.mark.parametrize("name", ["plain", "a parser of its own"])
    def test_a_command_after_which_the_end_was_read_is_not_sent_again(
        self, opened: Callable[..., Wire], proxy: Proxy, redis_client: redis.Redis, name: str
    ) -> None:
        """The end came before the acknowledgement of the command. Nobody knows whether the proxy forwards it."""
        wire = opened(proxy.url, **POOLS[name])
        assert wire._idle is not None
        owned = wire._idle.take()
        proxy.drain()
        with pytest.raises(Unanswered):
            owned.exchange(INCREASE.to_bytes("", b""))
        counter = partial(redis_client.get, "counter")
        until(lambda: counter() == b"1", "the proxy has forwarded it")


@pytest.mark.system
class TestTls:
    @pytest.mark.parametrize("is_async", [False, True])
    def test_the_same_holds_for_connections_over_tls(
        self, opened: Callable[..., Wire], tmp_path: Path, is_async: bool
    ) -> None:
        with TlsServer(tmp_path) as server, Proxy(server.port) as proxy, redis.Redis(port=server.server.port) as admin:
            url = proxy.url.replace("redis://", "rediss://")
            with Asker(opened(url, CONNECTION_POOL_KWARGS=server.pool_kwargs), is_async) as ask:
                ask.wire._pool.ages.wait = SOON
                assert ask() == 1
                let_be_idle(ask.wire, 2 * IDLE)
                proxy.forget()
                assert ask() == 2, "dropped without a word"
                before = pings(admin)
                ask.wire._pool.ages.wait = 10
                let_be_idle(ask.wire, 1.5 * IDLE)
                assert (ask(), pings(admin)) == (3, before + 1)
                admin.client_kill_filter(_type="normal", skipme=True)
                until(lambda: proxy.open == 0, "the proxy has closed its end too")
                let_be_idle(ask.wire, 2 * JUST_NOW)
                assert ask() == 4, "closed by the server"
                proxy.cut.set()
                with pytest.raises(Unanswered):
                    ask()
                proxy.cut.clear()
                assert ask() == 6, "not sent again, since it had arrived"


class TestTcp:
    def test_the_system_looks_for_dead_connections_unless_the_project_says_otherwise(
        self, asking: Callable[..., Asker], redis_url: str, kind: tuple[str, bool]
    ) -> None:
        own = {"socket_keepalive": True, "socket_keepalive_options": {socket.TCP_KEEPIDLE: 77}}
        idle, user = socket.TCP_KEEPIDLE, socket.TCP_USER_TIMEOUT
        cases: list[tuple[dict[str, Any], dict[int, int]]] = [
            ({}, {socket.SO_KEEPALIVE: 1, idle: ages.KEEPALIVE, user: 30_000}),
            ({"socket_keepalive": False}, {socket.SO_KEEPALIVE: 0, user: 0}),
            (own, {socket.SO_KEEPALIVE: 1, idle: 77, user: 0}),
        ]
        for number, (options, expected) in enumerate(cases):
            # django-redis stores pools by URL.
            name = f"{kind[0].replace(' ', '-')}-{kind[1]}-{number}"
            with asking(f"{redis_url}?client_name={name}", **options) as ask:
                ask(WHO)
                sock = socket_of(ask.wire)
                found = {
                    name: sock.getsockopt(
                        socket.SOL_SOCKET if name == socket.SO_KEEPALIVE else socket.IPPROTO_TCP, name
                    )
                    for name in expected
                }
                assert found == expected, options


def test_the_options_of_the_page_are_used(opened: Callable[..., Wire], redis_url: str) -> None:
    found = snippet("socket_keepalive_options")
    names: dict[str, Any] = {}
    exec(compile(found.text, found.page, "exec"), names)
    wire = opened(f"{redis_url}?client_name=page", **names["CACHES"]["default"]["OPTIONS"])
    wire.call(WHO, b"")
    assert wire._pool.ages.asked == 5
    assert socket_of(wire).getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 60


def socket_of(wire: Wire) -> Any:
    """Return the socket of the only open connection of a wire."""
    for shared, _end in wire._loops.values():
        return shared._link._transport.get_extra_info("socket")  # type: ignore[union-attr]
    if wire._idle is not None:
        (owned,) = wire._idle._idle
        return owned.connection._sock
    (connection,) = wire._pool._moments
    return connection._sock
