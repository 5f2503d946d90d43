"""Test that the doctor finds each restriction of a server, and says what would end it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import redis
from django.conf import settings
from django.test import override_settings
from redis.credentials import CredentialProvider

from ratelimits.doctor.diagnosis import ServerDiagnosis, diagnose
from ratelimits.doctor.findings import Part, ServerFinding, Who, of_connection, who_asks
from ratelimits.embedded import EmbeddedServer
from ratelimits.engine.server import current_server
from ratelimits.status.redis_state import RedisReading
from ratelimits.usage.models import Line
from tests.doctor.restrictions import ACLS, ALL, PASSWORD, SETTINGS, USER, connected, settings_of_server, user
from tests.support.engine.memory import NEAR, use_share
from tests.support.engine.proxy import Proxy
from tests.support.servers import TestServers
from tests.support.usage.traffic import flow, use


def failing(one: ServerDiagnosis) -> set[Part]:
    return {part for part in Part if not one.works(part)}


def named(one: ServerDiagnosis, name: str) -> ServerFinding | None:
    return next((found for found in one.findings if found.name == name), None)


def only() -> ServerDiagnosis:
    (one,) = diagnose()
    return one


@contextmanager
def server(folder: Path, servers: TestServers, *lines: str) -> Iterator[EmbeddedServer]:
    """Start a server of the session's kind with these lines in its configuration."""
    folder.mkdir()
    (folder / "more.conf").write_text("".join(f"{line}\n" for line in lines))
    running = EmbeddedServer(folder, aof=True, binary=servers.redis.binary, options={"include": "more.conf"})
    try:
        with connected(running.url):
            yield running
    finally:
        running.stop()


def test_everything_works_on_an_ordinary_server_and_nothing_is_left(redis_client: redis.Redis) -> None:
    one = only()
    assert (one.findings, failing(one), one.acl_line) == ((), set(), "")
    assert redis_client.keys() == []


def test_everything_works_for_the_documented_user(redis_client: redis.Redis, redis_url: str) -> None:
    with user(redis_client, *ALL), connected(redis_url, USER):
        assert only().findings == ()
    assert redis_client.keys() == []


def test_each_missing_right_is_named(redis_client: redis.Redis, redis_url: str) -> None:
    wrong = []
    for title, (denied, name, least, most, right) in ACLS.items():
        with user(redis_client, *ALL, *denied), connected(redis_url, USER):
            # Other tests have loaded the scripts.
            redis_client.script_flush()
            one = only()
        found = named(one, name)
        if found is None or f"ACL SETUSER {USER} {right}" not in found.mend or right not in one.acl_line:
            wrong.append(f"{title}: {one.findings}")
        if not least <= failing(one) <= most:
            wrong.append(f"{title}: {failing(one)}, and not from {least} to {most}: {one.findings}")
        if redis_client.keys() and title not in ("no UNLINK",):
            wrong.append(f"{title}: left {redis_client.keys()}")
        redis_client.flushall()
    assert wrong == []


#: What the user may not do; the findings with the parts that they stop; all missing rights.
SEVERAL: dict[str, tuple[tuple[str, ...], dict[str, set[Part]], str]] = {
    "a command that all can do without, and keys": (
        ("-ping", "resetkeys", "~rl:1:test:*"),
        {"command:PING": set(), "keys:~rl:1:simulate-*": {Part.TRIES}},
        "+ping ~rl:1:simulate-*",
    ),
    "keys of a part that a command stops": (
        ("-hscan", "resetkeys", "~rl:1:test:*"),
        {"command:HSCAN": {Part.BILLS, Part.TRIES}, "keys:~rl:1:simulate-*": {Part.TRIES}},
        "+hscan ~rl:1:simulate-*",
    ),
    "a right that two findings name": (
        ("-info",),
        {
            "command:INFO": {Part.RESTORES},
            "policy-unknown": set(),
            "memory-unknown": set(),
            "fence": {Part.BILLS},
        },
        "+info",
    ),
}


def test_each_of_several_reasons_is_named_once(redis_client: redis.Redis, redis_url: str) -> None:
    wrong = []
    for title, (denied, findings, line) in SEVERAL.items():
        with user(redis_client, *ALL, *denied), connected(redis_url, USER):
            one = only()
        if {found.name: set(found.parts) for found in one.findings} != findings:
            wrong.append(f"{title}: {one.findings}")
        if one.acl_line != f"ACL SETUSER {USER} {line}":
            wrong.append(f"{title}: {one.acl_line}")
    assert wrong == []


#: The fence; what the user may not do; the fences that work there; parts of what is said of those that do not.
FENCES: dict[str, tuple[str, tuple[str, ...], str, tuple[str, ...]]] = {
    "no CONFIG": (
        "aof",
        ("-config",),
        '"window" and "durable"',
        ('"wait" (fewer than 1 replicas', '"waitaof" (the server'),
    ),
    "no INFO": ("aof", ("-info",), '"durable"', ('"window" (the fence "window" must see', '"wait" (', '"waitaof" (')),
    "no CONFIG, no counts": ("aof", ("-config", "-hincrby"), '"window" and "durable"', ('"wait" (fewer than 1',)),
    "no WAITAOF": ("waitaof", (), '"aof", "window" and "durable"', ('"wait" (fewer than 1 replicas',)),
    "no replicas": ("wait", (), '"aof", "window" and "durable"', ('"waitaof" (the server',)),
    "no WAIT": ("wait", ("-wait",), '"aof", "window" and "durable"', ('"waitaof" (the server',)),
    "no fence by INFO": ("window", ("-info",), '"durable"', ('"aof" (', "allow", '"wait" (')),
}


@pytest.mark.slow
def test_only_the_fences_that_work_on_the_server_are_offered(redis_client: redis.Redis, redis_url: str) -> None:
    """Also where usage is not counted, so that nobody has tried the fence."""
    wrong = []
    for title, (fence, denied, working, others) in FENCES.items():
        with (
            override_settings(RATELIMITS={**settings.RATELIMITS, "FENCE": fence}),
            user(redis_client, *ALL, "+wait", *denied),
            connected(redis_url, USER),
        ):
            one = only()
        said = [found.mend for found in one.findings if found.name in {"fence", "command:CONFIG GET"}]
        expected = f"RATELIMITS['FENCE'] is \"{fence}\". If nobody can change this server, it accepts {working}: "
        if len(said) != 1 or expected not in said[0] or not all(text in said[0] for text in others):
            wrong.append(f"{title}: {one.findings}")
    assert wrong == []


def test_a_server_without_an_append_only_file_is_told_which_fences_need_none(redis_client: redis.Redis) -> None:
    with settings_of_server(redis_client, appendonly="no"):
        found = named(only(), "append-only")
    assert found is not None
    assert 'it accepts "window" and "durable": docs/billing/pipeline.md' in found.mend


#: What the user may not do; all missing rights, also of commands that are sent only after others were allowed.
HIDDEN = {
    ("-info", "-config"): {"+info", "+config|get"},
    ("-eval", "-lindex", "-zadd", "-config"): {"+eval", "+lindex", "+zadd", "+config|get"},
    ("-info", "-evalsha", "-script", "-config"): {"+info", "+evalsha", "+script|load", "+config|get"},
}


def test_the_line_has_rights_that_are_hidden_behind_others(redis_client: redis.Redis, redis_url: str) -> None:
    wrong = []
    for denied, expected in HIDDEN.items():
        with user(redis_client, *ALL, *denied), connected(redis_url, USER):
            line = only().acl_line
        with user(redis_client, *ALL, *denied, *line.split()[3:]), connected(redis_url, USER):
            again = only()
        if {*line.split()[3:]} != expected or again.findings:
            wrong.append(f"{denied}: {line}: {again.findings}")
    assert wrong == []


def test_the_command_that_stops_a_part_is_blamed_and_no_other(redis_client: redis.Redis, redis_url: str) -> None:
    with user(redis_client, *ALL, "-info", "-evalsha", "-script"), connected(redis_url, USER):
        redis_client.script_flush()
        one = only()
    stopped = {found.name: found.parts for found in one.findings}
    assert stopped["command:INFO"] == {Part.RESTORES}
    assert stopped["command:SCRIPT LOAD"] == set()
    assert {Part.LIMITS, Part.COUNTS} <= stopped["command:EVALSHA"]
    with user(redis_client, *ALL, "-info", "-script"), connected(redis_url, USER):
        redis_client.script_flush()
        assert failing(only()) == {Part.BILLS, Part.RESTORES}


def test_a_full_server_is_to_blame_and_no_command_that_is_not_needed(redis_client: redis.Redis, redis_url: str) -> None:
    redis_client.set("ballast", "x" * (8 << 20))
    with (
        settings_of_server(redis_client, maxmemory="0"),
        user(redis_client, *ALL, "-ping"),
        connected(redis_url, USER),
    ):
        use_share(redis_client, 4)
        one = only()
    redis_client.delete("ballast")
    assert {found.name: Part.LIMITS in found.parts for found in one.findings} == {"full": True, "command:PING": False}


def test_each_unsuitable_setting_is_named(redis_client: redis.Redis) -> None:
    wrong = []
    for title, (values, name, parts, mend) in SETTINGS.items():
        with settings_of_server(redis_client, **values):
            one = only()
        found = named(one, name)
        if found is None or mend not in found.mend or not parts <= failing(one):
            wrong.append(f"{title}: {one.findings}")
    assert wrong == []


def test_a_full_server_works_until_its_reserve_is_used(redis_client: redis.Redis) -> None:
    """The memory is never taken for commands that are missing."""
    wrong = []
    for megabytes, share, works in ((0, 1.1, {*Part} - {Part.TRIES}), (8, 4, set())):
        redis_client.set("ballast", "x" * (megabytes << 20))
        with settings_of_server(redis_client, maxmemory="0"):
            use_share(redis_client, share)
            one = only()
        redis_client.delete("ballast")
        if [found.name for found in one.findings] != ["full"] or not works <= {*Part} - failing(one):
            wrong.append(f"{megabytes}: {failing(one)}: {one.findings}")
        if megabytes and ("ratelimits_drain" not in one.findings[0].mend or Part.BILLS in failing(one)):
            wrong.append(f"{megabytes}: usage that waits can be drained, but the doctor says {one.findings}")
        if megabytes and not {Part.LIMITS, Part.COUNTS} <= failing(one):
            wrong.append(f"{megabytes}: the failure policies answer, but the doctor says {failing(one)}")
        if redis_client.keys():
            wrong.append(f"{megabytes}: left {redis_client.keys()}")
    assert wrong == []


@pytest.mark.django_db(transaction=True)
def test_usage_reaches_the_ledger_where_the_doctor_says_so(redis_client: redis.Redis) -> None:
    """The server is so full that it does not count any more."""
    use()
    redis_client.set("ballast", "x" * (8 << 20))
    with settings_of_server(redis_client, maxmemory="0"):
        use_share(redis_client, 4)
        assert Part.BILLS not in failing(only())
        flow()
    redis_client.delete("ballast")
    assert Line.objects.exists()


def test_memory_that_is_short_is_named_before_it_is_full(redis_client: redis.Redis) -> None:
    only()  # the server keeps the scripts
    redis_client.setrange("ballast", 2**24, b"x")
    with settings_of_server(redis_client, maxmemory="0"):
        use_share(redis_client, NEAR)
        one = only()
    redis_client.delete("ballast")
    assert ([found.name for found in one.findings], failing(one)) == (["nearly-full"], set())
    assert "new addresses of a network share one count" in one.findings[0].why


def test_two_servers_behind_one_address_are_named_without_info(
    redis_client: redis.Redis, servers: TestServers, tmp_path: Path
) -> None:
    """Without INFO no server tells its run, so all seem to be the same one."""
    other = EmbeddedServer(tmp_path / "s", aof=True, binary=servers.redis.binary)
    try:
        with redis.Redis(port=other.port) as client, Proxy(servers.redis.port) as proxy:
            with user(redis_client, *ALL, "-info"), user(client, *ALL, "-info"), connected(proxy.url, USER):
                assert named(only(), "several") is None
                proxy.in_turn(servers.redis.port, other.port)
                found = named(only(), "several")
            assert (client.keys(), redis_client.keys()) == ([], [])
    finally:
        other.stop()
    assert found is not None
    assert "2 different servers" in found.why


def test_a_policy_that_evicts_hides_no_other_finding(redis_client: redis.Redis, redis_url: str) -> None:
    with (
        settings_of_server(redis_client, maxmemory_policy="allkeys-lru"),
        user(redis_client, *ALL, "-config"),
        connected(redis_url, USER),
    ):
        one = only()
    assert {found.name: Part.BILLS in found.parts for found in one.findings} == {"evicts": True, "fence": True}


def test_keys_that_cannot_be_deleted_expire(redis_client: redis.Redis, redis_url: str) -> None:
    with user(redis_client, *ALL, "-unlink"), connected(redis_url, USER):
        only()
    left = redis_client.keys()
    assert left
    assert [key for key in left if redis_client.pttl(key) <= 0] == []


def test_nothing_is_written_if_no_key_could_end(redis_client: redis.Redis, redis_url: str) -> None:
    with user(redis_client, *ALL, "-unlink", "-pexpire"), connected(redis_url, USER):
        one = only()
        (state,) = RedisReading(tries=True).state().servers
    assert redis_client.keys() == []
    assert failing(one) == set(Part), "nobody knows what works"
    assert one.acl_line == f"ACL SETUSER {USER} +pexpire +unlink"
    for findings in (one.findings, state.refuses):
        assert [found.name for found in findings] == ["command:PEXPIRE", "command:UNLINK"]


def test_commands_that_the_server_does_not_have_are_named(tmp_path: Path, servers: TestServers) -> None:
    """HELLO is missing as on servers that speak only RESP 2. The app needs no other protocol."""
    lines = [f'rename-command {name} ""' for name in ("HELLO", "CONFIG", "BLPOP", "ZADD")]
    with server(tmp_path / "s", servers, *lines):
        one = only()
    for name, parts in (("BLPOP", {Part.WAITS}), ("ZADD", {Part.LIMITS, Part.LEASES})):
        found = named(one, f"command:{name}")
        assert found is not None, name
        assert parts <= found.parts, name
        assert f"rename-command {name.split()[0]}" in found.mend
    fence = named(one, "fence")
    assert fence is not None
    assert "the server does not have CONFIG GET" in fence.why
    assert failing(one) == {Part.LIMITS, Part.WAITS, Part.LEASES, Part.BILLS}
    assert one.acl_line == ""


class Provider(CredentialProvider):
    """Credentials from elsewhere, as those of a cloud."""

    def get_credentials(self) -> tuple[str, str]:
        return USER, PASSWORD


class FailsLater(Provider):
    """A provider that gives the credentials of the first connection only."""

    given = 0

    def get_credentials(self) -> tuple[str, str]:
        type(self).given += 1
        if self.given > 1:
            raise OSError("the cloud is away")
        return super().get_credentials()


def test_the_user_of_a_credential_provider_is_named(redis_client: redis.Redis, redis_url: str) -> None:
    wrong = []
    for rights, provider, expected in (
        (("+acl|whoami",), FailsLater, USER),
        ((), Provider, USER),
        ((), FailsLater, "<user>"),
    ):
        FailsLater.given = 0
        pool = redis.ConnectionPool.from_url(redis_url, credential_provider=provider())
        with user(redis_client, *ALL, *rights), redis.Redis(connection_pool=pool) as client:
            found, _simulating = who_asks(current_server(), client)
        pool.disconnect()
        if found.user != expected:
            wrong.append(f"{rights}, {provider}: {found.user}")
    assert wrong == []


def test_a_connection_that_lacks_tls_or_its_authority_says_what_to_write() -> None:
    who = Who(USER, "~*")
    for said, mend in (
        ("Error 1 connecting: [SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed", "ssl_ca_certs"),
        ("Error while reading from server: (104, 'Connection reset by peer')", "rediss://"),
        ("Connection closed by server.", "rediss://"),
        ("Error 111 connecting. Connection refused.", "RATELIMITS['TIMEOUT']"),
    ):
        assert mend in of_connection(redis.ConnectionError(said), who).mend, said


def test_a_replica_is_named(tmp_path: Path, servers: TestServers) -> None:
    with server(tmp_path / "s", servers, "replicaof 127.0.0.1 1"):
        one = only()
    assert [found.name for found in one.findings] == ["replica"]
    assert failing(one) == set(Part)


def test_a_wrong_password_and_a_server_that_is_away_are_named(redis_client: redis.Redis, redis_url: str) -> None:
    with user(redis_client, *ALL), connected(redis_url, USER, "wrong"):
        assert [found.name for found in only().findings] == ["login"]
    with connected("redis://127.0.0.1:1/0"):
        one = only()
    assert [found.name for found in one.findings] == ["connection"]
    assert failing(one) == set(Part)
