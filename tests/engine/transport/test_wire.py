"""Test the connections that carry decisions."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import redis
from django.core.cache import caches
from django.core.exceptions import ImproperlyConfigured
from redis.exceptions import ReadOnlyError, RedisError, ResponseError

from ratelimits.embedded import EmbeddedServer as RunningServer
from ratelimits.embedded import free_port
from ratelimits.engine.assemble.scripts import read, resp
from ratelimits.engine.transport import idle, link
from ratelimits.engine.transport.ages import IDLE
from ratelimits.engine.transport.connection import NotSent, Unanswered, read_run
from ratelimits.engine.transport.link import IN_FLIGHT
from ratelimits.engine.transport.pools import LONGEST_BLOCK, block_seconds
from ratelimits.engine.transport.wire import Wire
from tests.support.engine.proxy import Proxy
from tests.support.engine.saying import COUNT, PATIENT, TIMEOUT, WHO, Said, let_be_idle, say, script_call
from tests.support.eventually import until
from tests.support.garbage import collect_garbage
from tests.support.servers import TestServers, server_binary


def clients(client: redis.Redis) -> int:
    return len(client.client_list())


@contextmanager
def interruption(proxy: Proxy, command: bytes, times: int) -> Iterator[None]:
    """Stop this thread with KeyboardInterrupt when clients have sent a command this often, and expect this."""

    def interrupt() -> None:
        proxy.wait_for(command, times)
        os.kill(os.getpid(), signal.SIGUSR1)

    def interrupted(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGUSR1, interrupted)
    thread = threading.Thread(target=interrupt)
    try:
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            yield
    finally:
        thread.join()
        signal.signal(signal.SIGUSR1, before)


class TestSending:
    def test_a_command_is_one_round_trip_once_the_connection_has_learnt_the_servers_run(
        self, opened: Callable[..., Wire], proxy: Proxy, redis_client: redis.Redis
    ) -> None:
        wire, command = opened(proxy.url), say(b"ECHO", b"hello")
        assert [wire.call(command, b"") for _ in range(5)] == [b"hello"] * 5
        assert (proxy.connections, proxy.count(b"ECHO"), proxy.count(b"EVAL")) == (1, 5, 1)
        assert set(command.runs) == {read_run(redis_client)}

    def test_what_the_server_refuses_is_its_own_error_and_the_connection_stays(self, wire: Wire) -> None:
        before = wire.call(WHO, b"")
        with pytest.raises(ResponseError, match="unknown command"):
            wire.call(say(b"NONSENSE"), b"")
        assert wire.call(WHO, b"") == before

    def test_a_script_that_the_server_forgot_is_loaded_and_called_once(
        self, wire: Wire, redis_client: redis.Redis
    ) -> None:
        command = script_call(COUNT, b"1", b"counter")
        for number in range(1, 4):
            redis_client.script_flush()
            assert wire.call(command, b"") == number

    def test_a_wait_with_nearly_no_time_left_ends(self, wire: Wire) -> None:
        """Redis 6.2 rounds one millisecond to 0, which means for ever."""
        assert wire.pop("nobody pushes", 1e-6) is None

    def test_a_wait_for_an_element_ends_although_its_reply_is_lost(
        self, opened: Callable[..., Wire], proxy: Proxy
    ) -> None:
        """Not only after the longest wait of all, in sync and in async code."""
        wire, seconds, failures = opened(proxy.url, TIMEOUT), 1.0, []

        def wait(pop: Callable[[], object]) -> None:
            started = time.monotonic()
            with pytest.raises(NotSent, match="no reply within 1"):
                pop()
            failures.append(time.monotonic() - started)

        pops = (lambda: wire.pop("list", seconds), lambda: asyncio.run(wire.apop("list", seconds)))
        threads = [threading.Thread(target=wait, args=(pop,)) for pop in pops]
        for thread in threads:
            thread.start()
        proxy.wait_for(b"BLPOP", 2)
        proxy.lose.set()
        for thread in threads:
            thread.join()
        assert len(failures) == 2
        assert max(failures) < LONGEST_BLOCK / 2

    def test_a_script_of_ours_is_known_by_its_digest(self, redis_client: redis.Redis) -> None:
        script = read("memory/full", "run", "batch", "seal")
        assert redis_client.script_load(script.text) == script.sha.decode()

    def test_many_commands_are_answered_in_order_in_one_go(self, wire: Wire) -> None:
        command = script_call(COUNT, b"1", b"counter")
        packed = [lambda run: command.to_bytes(run, b"")] * 100
        assert wire.stream(packed, {command.script}) == list(range(1, 101))

    def test_a_refusal_among_many_is_told_once_all_are_read(self, wire: Wire) -> None:
        packed = [lambda run, words=words: resp(*words) for words in ((b"INCR", b"a"), (b"NONSENSE",), (b"INCR", b"a"))]
        with pytest.raises(ResponseError, match="unknown command"):
            wire.stream(packed, set())
        assert wire.call(say(b"GET", b"a"), b"") == b"2"


class TestLoss:
    """A lost reply is neither asked for again nor confused with another one."""

    def test_a_lost_reply_is_unanswered_in_time_and_the_command_was_sent_once(
        self, opened: Callable[..., Wire], proxy: Proxy, redis_client: redis.Redis
    ) -> None:
        wire = opened(proxy.url, TIMEOUT)
        wire.call(WHO, b"")
        proxy.lose.set()
        started = time.monotonic()
        with pytest.raises(Unanswered):
            wire.call(say(b"INCR", b"counter"), b"")
        assert time.monotonic() - started < 4 * TIMEOUT
        proxy.lose.clear()
        assert (redis_client.get("counter"), proxy.count(b"INCR")) == (b"1", 1)

    def test_it_is_unanswered_in_time_on_a_connection_that_was_idle_too(
        self, opened: Callable[..., Wire], proxy: Proxy
    ) -> None:
        wire = opened(proxy.url, TIMEOUT)
        wire.call(WHO, b"")
        let_be_idle(wire, 2 * IDLE)
        wire.call(WHO, b"")
        assert proxy.count(b"PING") == 1
        proxy.lose.set()
        started = time.monotonic()
        with pytest.raises(Unanswered, match=f"no reply within {TIMEOUT:g} s"):
            wire.call(WHO, b"")
        assert time.monotonic() - started < 4 * TIMEOUT

    def test_it_is_unanswered_in_time_where_a_timer_signals_all_the_time(
        self, opened: Callable[..., Wire], proxy: Proxy
    ) -> None:
        signals: list[int] = []
        before = signal.signal(signal.SIGALRM, lambda number, frame: signals.append(number))
        signal.setitimer(signal.ITIMER_REAL, TIMEOUT / 10, TIMEOUT / 10)
        try:
            wire = opened(proxy.url, TIMEOUT)
            wire.call(WHO, b"")
            proxy.lose.set()
            started = time.monotonic()
            with pytest.raises(Unanswered):
                wire.call(WHO, b"")
            assert time.monotonic() - started < 4 * TIMEOUT
            assert signals
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)

    def test_a_reply_that_comes_late_is_not_taken_for_the_next_one(
        self, opened: Callable[..., Wire], proxy: Proxy
    ) -> None:
        wire = opened(proxy.url, TIMEOUT)
        assert wire.call(say(b"ECHO", b"first"), b"") == b"first"
        proxy.hold()
        with pytest.raises(Unanswered):
            wire.call(say(b"ECHO", b"late"), b"")
        proxy.let_go()
        assert [wire.call(say(b"ECHO", word), b"") for word in (b"a", b"b")] == [b"a", b"b"]
        assert proxy.connections == 2

    def test_a_connection_cut_off_before_the_reply_is_unanswered_and_sent_once(
        self, opened: Callable[..., Wire], proxy: Proxy, redis_client: redis.Redis
    ) -> None:
        wire = opened(proxy.url)
        wire.call(WHO, b"")
        proxy.cut.set()
        with pytest.raises(Unanswered):
            wire.call(say(b"INCR", b"counter"), b"")
        proxy.cut.clear()
        assert (redis_client.get("counter"), proxy.count(b"INCR")) == (b"1", 1)
        assert wire.call(say(b"GET", b"counter"), b"") == b"1"

    def test_many_commands_whose_replies_are_lost_are_unanswered(
        self, opened: Callable[..., Wire], proxy: Proxy
    ) -> None:
        wire = opened(proxy.url, TIMEOUT)
        wire.call(WHO, b"")
        proxy.lose.set()
        with pytest.raises(Unanswered):
            wire.stream([lambda run: resp(b"INCR", b"counter")] * 3, set())
        assert proxy.count(b"INCR") == 3

    def test_without_a_server_nothing_is_sent(self, opened: Callable[..., Wire]) -> None:
        wire, command = opened(f"redis://127.0.0.1:{free_port()}/0"), say(b"INCR", b"counter")
        for _ in range(2):
            with pytest.raises(NotSent):
                wire.call(command, b"")
        assert command.runs == []

    def test_a_server_that_accepts_and_says_nothing_was_sent_no_command(
        self, opened: Callable[..., Wire], proxy: Proxy
    ) -> None:
        wire = opened(proxy.url, TIMEOUT)
        proxy.lose.set()
        with pytest.raises(NotSent):
            wire.call(say(b"INCR", b"counter"), b"")
        proxy.lose.clear()
        assert proxy.count(b"INCR") == 0
        assert wire.call(say(b"INCR", b"counter"), b"") == 1

    def test_a_connection_that_the_server_closed_meanwhile_is_noticed_before_it_is_used(
        self, wire: Wire, redis_client: redis.Redis
    ) -> None:
        before = wire.call(WHO, b"")
        redis_client.client_kill_filter(_id=before)
        let_be_idle(wire, 2 * IDLE)
        assert wire.call(WHO, b"") > before

    def test_a_server_that_became_a_replica_did_nothing_and_is_connected_to_anew(
        self, opened: Callable[..., Wire], own_server: RunningServer
    ) -> None:
        """If the server's name or address moves, connecting again reaches the new primary."""
        wire, command = opened(own_server.url), script_call(COUNT, b"1", b"counter")
        before = wire.call(WHO, b"")
        with redis.Redis.from_url(own_server.url) as client:
            client.replicaof("127.0.0.1", free_port())
            with pytest.raises(NotSent, match=r"READONLY|read only"):
                wire.call(command, b"")
            with pytest.raises(NotSent, match=r"READONLY|read only"):
                asyncio.run(wire.acall(command, b""))
            client.replicaof("NO", "ONE")
        assert wire.call(WHO, b"") > before
        assert wire.call(command, b"") == 1

    def test_a_replica_that_hears_nothing_of_its_primary_did_nothing_and_is_connected_to_anew(
        self, opened: Callable[..., Wire], own_server: RunningServer
    ) -> None:
        """It answers MASTERDOWN before it reads what a script would write."""
        wire, command = opened(own_server.url), script_call(COUNT, b"1", b"counter")
        before = wire.call(WHO, b"")
        with redis.Redis.from_url(own_server.url) as client, asyncio.Runner() as runner:
            assert runner.run(wire.acall(command, b"")) == 1
            client.config_set("replica-serve-stale-data", "no")
            client.replicaof("127.0.0.1", free_port())
            with pytest.raises(NotSent, match="MASTER"):
                wire.call(command, b"")
            with pytest.raises(NotSent, match="MASTER"):
                runner.run(wire.acall(command, b""))
            client.replicaof("NO", "ONE")
            assert wire.call(WHO, b"") > before
            assert runner.run(wire.acall(WHO, b"")) > before
        assert wire.call(command, b"") == 2

    def test_a_connection_of_seal_and_drain_whose_server_refused_a_write_is_replaced(
        self, opened: Callable[..., Wire], own_server: RunningServer
    ) -> None:
        wire = opened(own_server.url)
        with redis.Redis.from_url(own_server.url) as client:
            pipeline: Any = wire.client.pipeline(transaction=False)
            for write in (lambda: wire.client.incr("counter"), lambda: pipeline.incr("counter").execute()):
                before = wire.client.client_id()
                client.replicaof("127.0.0.1", free_port())
                with pytest.raises(ReadOnlyError):
                    write()
                client.replicaof("NO", "ONE")
                assert (after := wire.client.client_id()) > before
                assert wire.client.client_id() == after

    @pytest.mark.parametrize("command", ["append", "rpush"])
    def test_what_is_no_decision_is_not_sent_again_either(
        self, opened: Callable[..., Wire], proxy: Proxy, redis_client: redis.Redis, command: str
    ) -> None:
        wire = opened(proxy.url, TIMEOUT, CONNECTION_POOL_KWARGS={"retry_on_timeout": True})
        wire.client.ping()
        proxy.lose.set()
        with pytest.raises(RedisError):
            getattr(wire.client, command)("counter", 1)
        assert proxy.count(command.encode()) == 1


class TestThreadsAndProcesses:
    def test_what_connects_at_a_time_is_bounded_and_what_is_idle_too(
        self,
        opened: Callable[..., Wire],
        proxy: Proxy,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setattr(idle, "IDLE_CONNECTIONS", 3)
        monkeypatch.setattr(idle, "CONNECTING", 8)
        wire, replies = opened(proxy.url), []
        proxy.hold()
        greeted = [threading.Thread(target=lambda: replies.append(wire.call(say(b"PING"), b""))) for _ in range(10)]
        for thread in greeted:
            thread.start()
        until(lambda: proxy.connections == 8, "as many connect as may at a time")
        proxy.let_go()
        for thread in greeted:
            thread.join()
        assert replies == [b"PONG"] * 10
        until(lambda: proxy.open == 3, "the others are closed")
        assert {wire.call(say(b"ECHO", b"%d" % number), b"") for number in range(5)} == {b"0", b"1", b"2", b"3", b"4"}
        assert proxy.connections <= 10

    def test_many_threads_at_once_are_all_told_of_the_attempts_that_failed(
        self, opened: Callable[..., Wire], proxy: Proxy
    ) -> None:
        wire, errors = opened(proxy.url, TIMEOUT), []
        proxy.lose.set()

        def work() -> None:
            try:
                wire.call(WHO, b"")
            except NotSent as error:
                errors.append(error)

        threads = [threading.Thread(target=work) for _ in range(100)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(errors) == 100
        assert proxy.connections == len({error.event for error in errors}) <= 2 * idle.CONNECTING

    def test_the_connection_given_back_last_is_taken_first_by_whatever_thread(
        self, wire: Wire, redis_client: redis.Redis
    ) -> None:
        first, seen = wire.call(WHO, b""), []
        waiting = threading.Thread(target=wire.call, args=(say(b"BLPOP", b"list", b"0"), b""))
        waiting.start()
        until(lambda: redis_client.info("clients")["blocked_clients"] == 1, "the first connection is in use")
        assert wire.call(WHO, b"") != first
        redis_client.lpush("list", "an element")
        waiting.join()
        for _ in range(20):
            thread = threading.Thread(target=lambda: seen.append(wire.call(WHO, b"")))
            thread.start()
            thread.join()
        assert seen == [first] * 20

    def test_a_call_that_was_interrupted_gives_nothing_back(self, opened: Callable[..., Wire], proxy: Proxy) -> None:
        wire = opened(proxy.url)
        assert wire.call(say(b"ECHO", b"first"), b"") == b"first"
        proxy.hold()

        with interruption(proxy, b"ECHO", 2):
            wire.call(say(b"ECHO", b"interrupted"), b"")
        proxy.let_go()
        assert [wire.call(say(b"ECHO", word), b"") for word in (b"a", b"b")] == [b"a", b"b"]
        assert proxy.connections == 2

    def test_an_interrupted_wait_for_the_answer_of_an_idle_connection_or_for_the_run_leaves_no_connection_in_use(
        self, opened: Callable[..., Wire], proxy: Proxy
    ) -> None:
        wire = opened(proxy.url, CONNECTION_POOL_CLASS="tests.engine.transport.test_wire.Pool")
        wire.client.ping()
        for word, ask in ((b"PING", wire.client.time), (b"EVAL", partial(wire.call, WHO, b""))):
            if word == b"PING":
                let_be_idle(wire, 2 * IDLE)
            else:
                wire._runs.clear()  # as for a connection that is new
            proxy.hold()
            with interruption(proxy, word, proxy.count(word) + 1):
                ask()
            proxy.let_go()
            assert len(wire._pool._in_use_connections) == 0, word
            assert wire.call(say(b"ECHO", b"a"), b"") == b"a"

    def test_threads_may_come_and_go_without_end(self, wire: Wire, redis_client: redis.Redis) -> None:
        before, failures = clients(redis_client), []

        def work() -> None:
            try:
                wire.call(WHO, b"")
            except Exception as error:  # noqa: BLE001  (told to the test's thread)
                failures.append(error)

        for _ in range(150):
            thread = threading.Thread(target=work)
            thread.start()
            thread.join()
        assert failures == []
        collect_garbage()
        assert clients(redis_client) <= before + 2

    def test_a_forked_child_speaks_on_a_connection_of_its_own(self, wire: Wire) -> None:
        mine = wire.call(WHO, b"")
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                os.write(writing, b"%d" % wire.call(WHO, b""))
            finally:
                os._exit(0)
        os.close(writing)
        os.waitpid(child, 0)
        with os.fdopen(reading, "rb") as pipe:
            theirs = int(pipe.read())
        assert theirs > mine
        assert wire.call(WHO, b"") == mine

    def test_a_forked_child_has_locks_of_its_own_before_its_first_threads_call(self, wire: Wire) -> None:
        """The lock that the parent has perhaps held must not be the lock of any thread of the child."""
        plain, renewable = wire._idle, idle.RenewableConnections(wire._pool)
        assert plain is not None

        def locks() -> set[int]:
            return {id(one) for one in (plain._connecting, renewable._connecting, renewable._lock)}

        kept = [plain._connecting, renewable._connecting, renewable._lock]  # so that their ids are not used again
        child = os.fork()
        if child == 0:
            os._exit(len(locks() & {id(one) for one in kept}))
        assert os.waitpid(child, 0)[1] == 0

    def test_a_forked_childs_loop_has_a_connection_of_its_own_and_the_parents_stays(self, wire: Wire) -> None:
        reading, writing = os.pipe()
        with asyncio.Runner() as runner:
            mine = runner.run(wire.acall(WHO, b""))
            child = os.fork()
            if child == 0:
                try:
                    os.write(writing, b"%d" % asyncio.run(wire.acall(WHO, b"")))
                finally:
                    os._exit(0)
            os.close(writing)
            os.waitpid(child, 0)
            with os.fdopen(reading, "rb") as pipe:
                theirs = int(pipe.read())
            assert theirs > mine
            assert runner.run(wire.acall(WHO, b"")) == mine


class TestRuns:
    """A connection knows the run of its server, also after the server was replaced."""

    def test_a_thread_learns_the_new_run_of_a_restarted_server(
        self, opened: Callable[..., Wire], own_server: RunningServer
    ) -> None:
        wire, command = opened(own_server.url), say(b"PING")
        wire.call(command, b"")
        own_server.stop()
        own_server.start()
        wire.call(command, b"")
        with redis.Redis.from_url(own_server.url) as client:
            assert command.runs[-1] == read_run(client) != command.runs[0]

    def test_an_event_loop_learns_the_new_run_of_a_restarted_server(
        self, opened: Callable[..., Wire], own_server: RunningServer
    ) -> None:
        wire, command = opened(own_server.url), say(b"PING")

        def restart() -> None:
            own_server.stop()
            own_server.start()

        async def work() -> str:
            await wire.acall(command, b"")
            await asyncio.to_thread(restart)
            await wire.acall(command, b"")
            # While the loop runs, because the server ends with the thread that started it, and this thread ends with
            # the loop.
            with redis.Redis.from_url(own_server.url) as client:
                return read_run(client)

        run = asyncio.run(work())
        assert command.runs[-1] == run != command.runs[0]

    def test_a_server_in_a_folder_whose_name_is_no_text_is_known_too(
        self, opened: Callable[..., Wire], servers: TestServers, tmp_path: Path
    ) -> None:
        folder = tmp_path / os.fsdecode(b"b\xfcro")
        folder.mkdir()
        binary = folder / "server"
        binary.symlink_to(server_binary(servers.redis_kind))  # INFO shows the path of the server
        server = RunningServer(tmp_path / "own", binary=binary)
        try:
            wire, command = opened(server.url), say(b"PING")
            assert wire.call(command, b"") == b"PONG"
            assert asyncio.run(wire.acall(command, b"")) == b"PONG"
            assert len(set(command.runs)) == 1
        finally:
            server.stop()

    def test_a_pool_of_another_kind_learns_it_too(self, opened: Callable[..., Wire], own_server: RunningServer) -> None:
        wire, command = (
            opened(own_server.url, CONNECTION_POOL_CLASS="tests.engine.transport.test_wire.Pool"),
            say(b"PING"),
        )
        wire.call(command, b"")
        own_server.stop()
        own_server.start()
        wire.call(command, b"")
        with redis.Redis.from_url(own_server.url) as client:
            assert command.runs[-1] == read_run(client) != command.runs[0]


class Pool(redis.ConnectionPool):
    """A pool of an unknown class."""


class Client(redis.Redis):
    """A client of an unknown class, which must not be asked: its commands may do anything."""

    def execute_command(self, *args: Any, **options: Any) -> Any:
        raise AssertionError(args)


class Connection(redis.Connection):
    """A connection of an unknown class."""


class TestConfiguration:
    def test_an_alias_of_another_kind_is_refused_with_what_to_write(self) -> None:
        from django.core.cache.backends.locmem import LocMemCache

        caches["wire"] = LocMemCache("wire", {})
        try:
            with pytest.raises(ImproperlyConfigured, match=r"^RATELIMITS\['CACHE_ALIAS'\] is 'wire', which is no"):
                Wire("wire", TIMEOUT)
        finally:
            del caches["wire"]

    @pytest.mark.parametrize(
        "options",
        [
            {"CONNECTION_POOL_KWARGS": {"max_connections": 1, "decode_responses": True, "protocol": 3}},
            {"CONNECTION_POOL_KWARGS": {"health_check_interval": 1, "retry_on_timeout": True}},
            {"CONNECTION_POOL_CLASS": "redis.BlockingConnectionPool", "CONNECTION_POOL_KWARGS": {"timeout": 1}},
            {"CONNECTION_POOL_CLASS": "tests.engine.transport.test_wire.Pool"},
            {"SOCKET_TIMEOUT": 30, "SOCKET_CONNECT_TIMEOUT": 30},
        ],
    )
    def test_whatever_the_alias_says_replies_are_bytes_and_timeouts_short(
        self, opened: Callable[..., Wire], proxy: Proxy, options: dict[str, Any]
    ) -> None:
        wire = opened(proxy.url, TIMEOUT, **options)
        assert wire.call(say(b"ECHO", b"hello"), b"") == b"hello"
        assert asyncio.run(wire.acall(say(b"ECHO", b"hello"), b"")) == b"hello"
        proxy.lose.set()
        started = time.monotonic()
        with pytest.raises(Unanswered):
            wire.call(say(b"INCR", b"counter"), b"")
        assert time.monotonic() - started < 4 * TIMEOUT
        assert proxy.count(b"INCR") == 1

    def test_a_client_of_ones_own_names_the_server_and_each_thread_keeps_its_own_connection(
        self, opened: Callable[..., Wire], proxy: Proxy
    ) -> None:
        wire = opened(proxy.url, REDIS_CLIENT_CLASS="tests.engine.transport.test_wire.Client")
        assert [wire.call(WHO, b"") for _ in range(3)] == [wire.call(WHO, b"")] * 3
        assert (proxy.connections, wire.client.ping()) == (1, True)

    def test_threads_take_turns_with_the_connections_of_a_pool_of_ones_own(
        self, opened: Callable[..., Wire], proxy: Proxy
    ) -> None:
        wire = opened(proxy.url, CONNECTION_POOL_CLASS="tests.engine.transport.test_wire.Pool")
        first, seen = wire.call(WHO, b""), []
        for _ in range(3):
            thread = threading.Thread(target=lambda: seen.append(wire.call(WHO, b"")))
            thread.start()
            thread.join()
        assert (seen, proxy.connections) == ([first] * 3, 1)

    def test_connections_of_ones_own_serve_the_sync_functions_and_the_async_ones_say_so(
        self, opened: Callable[..., Wire], proxy: Proxy
    ) -> None:
        wire = opened(proxy.url, CONNECTION_POOL_KWARGS={"connection_class": Connection})
        assert wire.call(say(b"ECHO", b"hello"), b"") == b"hello"
        with pytest.raises(ImproperlyConfigured, match=r"^Connection has no asyncio version: use the sync functions"):
            asyncio.run(wire.acall(say(b"ECHO", b"hello"), b""))

    def test_a_pool_keeps_no_connection_whose_server_was_away(self, opened: Callable[..., Wire], proxy: Proxy) -> None:
        wire = opened(proxy.url, CONNECTION_POOL_CLASS="tests.engine.transport.test_wire.Pool")
        proxy.cut.set()
        for _ in range(3):
            with pytest.raises(NotSent):
                wire.call(WHO, b"")
        proxy.cut.clear()
        first = wire.call(WHO, b"")
        assert wire.call(WHO, b"") == first

    def test_a_password_and_a_unix_socket(
        self, opened: Callable[..., Wire], servers: TestServers, tmp_path: Path
    ) -> None:
        path = tmp_path / "s"
        running = RunningServer(
            tmp_path / "server", binary=server_binary(servers.redis_kind), options={"unixsocket": str(path)}
        )
        try:
            with redis.Redis.from_url(running.url) as client:
                client.config_set("requirepass", "secret")
            wire = opened(f"unix://:secret@{path}?db=3")
            assert wire.call(say(b"SET", b"a", b"1"), b"") == b"OK"
            assert asyncio.run(wire.acall(say(b"GET", b"a"), b"")) == b"1"
            with pytest.raises(NotSent):
                opened(f"unix://:wrong@{path}?db=3").call(WHO, b"")
        finally:
            running.stop()


class TestAsync:
    async def test_many_at_once_share_one_connection(
        self, opened: Callable[..., Wire], redis_url: str, redis_client: redis.Redis
    ) -> None:
        wire = opened(redis_url)
        before = clients(redis_client)
        replies = await asyncio.gather(*(wire.acall(say(b"ECHO", b"%d" % n), b"") for n in range(500)))
        assert replies == [b"%d" % n for n in range(500)]
        assert clients(redis_client) == before + 1

    async def test_the_loop_goes_on_while_the_server_thinks(self, wire: Wire, redis_client: redis.Redis) -> None:
        await wire.acall(WHO, b"")
        redis_client.client_pause(100)
        waiting = asyncio.ensure_future(wire.acall(say(b"INCR", b"counter"), b""))
        turns = 0
        while not waiting.done():
            await asyncio.sleep(0.001)
            turns += 1
        assert (waiting.result(), turns > 5) == (1, True)

    def test_each_loop_has_connections_of_its_own_and_takes_them_along_when_it_ends(
        self, wire: Wire, redis_client: redis.Redis
    ) -> None:
        before = clients(redis_client)
        seen = [asyncio.run(wire.acall(WHO, b"")) for _ in range(20)]
        assert len(set(seen)) == 20
        assert clients(redis_client) <= before + 1

    @pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
    def test_loops_that_ended_threads_have_left_open_are_forgotten(self, wire: Wire, redis_client: redis.Redis) -> None:
        def leave_open() -> None:
            asyncio.new_event_loop().run_until_complete(wire.acall(WHO, b""))

        collect_garbage()  # what earlier tests have left
        before = clients(redis_client)
        for _ in range(5):
            thread = threading.Thread(target=leave_open)
            thread.start()
            thread.join()
        asyncio.run(wire.acall(WHO, b""))
        collect_garbage()
        assert len(wire._loops) == 0
        until(lambda: clients(redis_client) <= before, "the server has noticed that the connections are closed")

    def test_loops_in_two_threads_do_not_meet(self, wire: Wire) -> None:
        async def work(word: bytes) -> list[bytes]:
            return [await wire.acall(say(b"ECHO", word), b"") for _ in range(50)]

        replies: dict[bytes, list[bytes]] = {}
        threads = [
            threading.Thread(target=lambda word=word: replies.update({word: asyncio.run(work(word))}))
            for word in (b"a", b"b")
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert replies == {word: [word] * 50 for word in (b"a", b"b")}

    async def test_a_script_that_the_server_forgot_is_loaded_and_called_once(
        self, wire: Wire, redis_client: redis.Redis
    ) -> None:
        command = script_call(COUNT, b"1", b"counter")
        for number in range(1, 4):
            redis_client.script_flush()
            assert await wire.acall(command, b"") == number

    async def test_a_lost_reply_is_unanswered_and_a_late_one_is_nobodys(
        self, opened: Callable[..., Wire], proxy: Proxy, redis_client: redis.Redis
    ) -> None:
        wire = opened(proxy.url, TIMEOUT)
        await wire.acall(WHO, b"")
        proxy.hold()
        with pytest.raises(Unanswered):
            await wire.acall(say(b"INCR", b"counter"), b"")
        proxy.let_go()
        assert [await wire.acall(say(b"ECHO", word), b"") for word in (b"a", b"b")] == [b"a", b"b"]
        assert (redis_client.get("counter"), proxy.count(b"INCR")) == (b"1", 1)

    async def test_a_call_that_is_cancelled_once_it_is_written_has_its_reply_first(
        self, opened: Callable[..., Wire], proxy: Proxy
    ) -> None:
        wire = opened(proxy.url)
        await wire.acall(WHO, b"")
        proxy.hold()
        waiting = asyncio.ensure_future(wire.acall(say(b"ECHO", b"cancelled"), b""))
        await asyncio.to_thread(proxy.wait_for, b"ECHO")
        waiting.cancel()
        proxy.let_go()
        assert (await waiting, waiting.cancelling()) == (b"cancelled", 1)
        assert [await wire.acall(say(b"ECHO", word), b"") for word in (b"a", b"b")] == [b"a", b"b"]

    async def test_without_a_server_nothing_is_sent(self, opened: Callable[..., Wire]) -> None:
        wire, command = opened(f"redis://127.0.0.1:{free_port()}/0"), say(b"INCR", b"counter")
        with pytest.raises(NotSent):
            await wire.acall(command, b"")
        assert command.runs == []

    async def test_what_the_server_refuses_is_its_own_error(self, wire: Wire) -> None:
        with pytest.raises(ResponseError, match="unknown command"):
            await wire.acall(say(b"NONSENSE"), b"")
        assert await wire.acall(say(b"ECHO", b"a"), b"") == b"a"


async def ended(tasks: list[asyncio.Task[Any]]) -> list[Any]:
    """Return the results of the tasks, or the types of their errors."""
    found = await asyncio.gather(*tasks, return_exceptions=True)
    return [type(one) if isinstance(one, BaseException) else one for one in found]


class TestMultiplexing:
    """The tasks of a loop share one connection. A failed task does not affect others, unless the connection is lost."""

    async def test_what_is_asked_in_one_turn_is_written_in_one_go_behind_the_first(
        self, wire: Wire, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        written: list[bytes] = []
        monkeypatch.setattr(link, "IN_FLIGHT", 1000)
        await wire.acall(WHO, b"")
        transport = link_of(wire)._transport
        write = transport.write

        def note(data: bytes) -> None:
            written.append(data)
            write(data)

        monkeypatch.setattr(transport, "write", note)
        replies = await asyncio.gather(*(wire.acall(say(b"ECHO", b"%d" % n), b"") for n in range(500)))
        assert replies == [b"%d" % n for n in range(500)]
        assert [data.count(b"ECHO") for data in written] == [1, 499]

    async def test_callers_that_are_cancelled_in_a_burst_leave_no_reply_to_another_one(
        self, opened: Callable[..., Wire], proxy: Proxy
    ) -> None:
        wire = opened(proxy.url)
        await wire.acall(WHO, b"")
        proxy.hold()
        tasks = [asyncio.ensure_future(wire.acall(say(b"ECHO", b"%d" % n), b"")) for n in range(1000)]
        await asyncio.to_thread(proxy.wait_for, b"ECHO", IN_FLIGHT)
        for task in tasks[::3]:
            task.cancel()
        proxy.let_go()
        # Tasks whose command was already written get their reply, and then see that they were cancelled.
        gone = [n % 3 == 0 and n >= IN_FLIGHT for n in range(1000)]
        expected = [asyncio.CancelledError if gone[n] else b"%d" % n for n in range(1000)]
        assert await ended(tasks) == expected
        assert await wire.acall(say(b"ECHO", b"next"), b"") == b"next"
        assert proxy.connections == 1
        # The commands of tasks that were cancelled while they waited were not sent.
        assert proxy.count(b"ECHO") < 1001

    async def test_what_was_written_on_a_connection_that_is_cut_is_unanswered_and_the_rest_not_sent(
        self, opened: Callable[..., Wire], proxy: Proxy
    ) -> None:
        wire = opened(proxy.url)
        await wire.acall(WHO, b"")
        proxy.cut.set()
        tasks = [asyncio.ensure_future(wire.acall(say(b"INCR", b"counter"), b"")) for _ in range(1000)]
        kinds = await ended(tasks)
        written = kinds.count(Unanswered)
        assert 1 <= written <= IN_FLIGHT
        assert kinds == [Unanswered] * written + [NotSent] * (1000 - written)
        # The connection was lost, and for the rest no other one could be made.
        assert len({task.exception().event for task in tasks}) == 2  # type: ignore[union-attr]
        proxy.cut.clear()
        # A command that was written may have been run once or not at all, never twice.
        assert 1 <= int(await wire.acall(say(b"GET", b"counter"), b"")) <= written

    async def test_a_server_that_stops_answers_nobody_and_is_connected_to_anew(
        self, opened: Callable[..., Wire], own_server: RunningServer
    ) -> None:
        wire = opened(own_server.url, TIMEOUT)
        await wire.acall(WHO, b"")
        own_server.process.send_signal(signal.SIGSTOP)
        try:
            tasks = [asyncio.ensure_future(wire.acall(say(b"INCR", b"counter"), b"")) for _ in range(200)]
            assert await ended(tasks) == [Unanswered] * IN_FLIGHT + [NotSent] * (200 - IN_FLIGHT)
            # The system accepts the connection, the server says nothing.
            tasks = [asyncio.ensure_future(wire.acall(say(b"INCR", b"counter"), b"")) for _ in range(200)]
            assert await ended(tasks) == [NotSent] * 200
        finally:
            own_server.process.send_signal(signal.SIGCONT)
        assert await wire.acall(say(b"ECHO", b"a"), b"") == b"a"

    async def test_all_who_ask_before_there_is_a_connection_share_one_attempt(
        self, opened: Callable[..., Wire], proxy: Proxy
    ) -> None:
        wire = opened(proxy.url)
        proxy.cut.set()
        tasks = [asyncio.ensure_future(wire.acall(say(b"INCR", b"counter"), b"")) for _ in range(100)]
        assert await ended(tasks) == [NotSent] * 100
        assert (proxy.connections, proxy.count(b"INCR")) == (1, 0)
        proxy.cut.clear()
        assert await asyncio.gather(*(wire.acall(say(b"INCR", b"c"), b"") for _ in range(9))) == [*range(1, 10)]
        assert proxy.connections == 2

    async def test_the_caller_that_connects_may_be_cancelled(self, opened: Callable[..., Wire], proxy: Proxy) -> None:
        wire = opened(proxy.url)
        proxy.hold()
        first, second = (asyncio.ensure_future(wire.acall(say(b"ECHO", word), b"")) for word in (b"a", b"b"))
        await asyncio.to_thread(until, lambda: proxy.connections, "somebody connects")
        first.cancel()
        proxy.let_go()
        assert await ended([first, second]) == [asyncio.CancelledError, b"b"]
        assert (proxy.connections, proxy.count(b"ECHO")) == (1, 1)

    async def test_waiting_for_ones_own_turn_takes_as_long_as_it_takes(
        self, opened: Callable[..., Wire], redis_url: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Twelve calls one after the other take longer, in all, than the timeout of each."""
        monkeypatch.setattr(link, "IN_FLIGHT", 1)
        wire = opened(redis_url, 1)
        waits = [wire.acall(say(b"BLPOP", b"nobody pushes", b"0.1"), b"") for _ in range(12)]
        assert await asyncio.gather(*waits) == [None] * 12

    @pytest.mark.parametrize("connected", [True, False])
    async def test_a_loop_that_is_busy_is_no_failure_of_the_server(
        self, opened: Callable[..., Wire], redis_url: str, connected: bool
    ) -> None:
        wire = opened(redis_url, TIMEOUT)
        if connected:
            await wire.acall(WHO, b"")
        waiting = asyncio.ensure_future(wire.acall(say(b"ECHO", b"a"), b""))
        for _ in range(5):
            time.sleep(2 * TIMEOUT)  # noqa: ASYNC251  (the loop has other things to do)
            await asyncio.sleep(0)
        assert await waiting == b"a"

    async def test_a_server_that_takes_no_writes_is_left_when_it_has_answered_all_that_it_was_sent(
        self, opened: Callable[..., Wire], own_server: RunningServer
    ) -> None:
        wire, command = opened(own_server.url), script_call(COUNT, b"1", b"counter")
        before = await wire.acall(WHO, b"")
        await wire.acall(command, b"")
        with redis.Redis.from_url(own_server.url) as client:
            client.replicaof("127.0.0.1", free_port())
            asked = [say(b"ECHO", b"a"), command, say(b"ECHO", b"b"), command]
            tasks = [asyncio.ensure_future(wire.acall(one, b"")) for one in asked]
            assert await ended(tasks) == [b"a", NotSent, b"b", NotSent]
            client.replicaof("NO", "ONE")
        assert await wire.acall(WHO, b"") > before
        assert await wire.acall(command, b"") == 2

    async def test_a_reply_that_makes_no_sense_leaves_no_caller_waiting(
        self, opened: Callable[..., Wire], proxy: Proxy
    ) -> None:
        """Also not the one whose command the server refused just before, because it wants credentials again."""
        wire = opened(proxy.url)
        await wire.acall(WHO, b"")
        proxy.replaced = {b"$5\r\nfirst": b"-NOAUTH x", b"$6\r\nsecond": b"?unknown!!"}
        tasks = [
            asyncio.ensure_future(wire.acall(say(b"ECHO", word), b"")) for word in (b"zeroth", b"first", b"second")
        ]
        assert await asyncio.wait_for(ended(tasks), PATIENT) == [b"zeroth", NotSent, Unanswered]

    async def test_a_command_that_cannot_be_made_is_its_callers_own_error(self, wire: Wire) -> None:
        class Broken(Said):
            def to_bytes(self, run: str, nonce: bytes) -> bytes:
                raise ValueError("no such moment")

        tasks = [
            asyncio.ensure_future(wire.acall(one, b"")) for one in (say(b"ECHO", b"a"), Broken(()), say(b"ECHO", b"b"))
        ]
        assert await ended(tasks) == [b"a", ValueError, b"b"]

    def test_what_waits_as_the_loop_ends_is_let_go(
        self, opened: Callable[..., Wire], proxy: Proxy, redis_client: redis.Redis
    ) -> None:
        wire, before = opened(proxy.url, TIMEOUT), clients(redis_client)

        async def leave() -> None:
            await wire.acall(WHO, b"")
            proxy.hold()
            asyncio.ensure_future(wire.acall(say(b"ECHO", b"a"), b""))  # noqa: RUF006
            await asyncio.to_thread(proxy.wait_for, b"ECHO")

        asyncio.run(leave())
        proxy.let_go()
        until(lambda: clients(redis_client) == before, "the connection is closed")
        assert len(wire._loops) == 0


def link_of(wire: Wire) -> Any:
    """Return the open connection of the running loop."""
    return wire._loops[asyncio.get_running_loop()][0]._link


def test_the_shortest_wait_for_a_list_ends_on_redis_6(tmp_path: Path) -> None:
    """Redis 6.2 waits for ever if the timeout is a millisecond."""
    server = RunningServer(tmp_path / "s", binary=server_binary("redis6"))
    try:
        with redis.Redis(port=server.port, socket_timeout=10) as client:
            assert client.blpop(["nothing"], timeout=block_seconds(0.000_1)) is None
    finally:
        server.stop()
