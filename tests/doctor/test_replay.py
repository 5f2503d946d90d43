"""Test what the doctor says of the rights with which a server reads its append-only file again."""

from __future__ import annotations

from pathlib import Path

import pytest
import redis

from ratelimits.checks.server import check_redis_server
from ratelimits.doctor.commands import HASH, USED
from ratelimits.doctor.diagnosis import diagnose
from ratelimits.doctor.findings import Part
from ratelimits.doctor.tries import WRITES
from ratelimits.embedded import EmbeddedServer
from ratelimits.models import Rule
from ratelimits.status.redis_state import RedisReading
from tests.doctor.restrictions import ALL, PASSWORD, USER, connected, user
from tests.support.rows import rule
from tests.support.selection import few
from tests.support.servers import server_binary

#: The rights of the user default, and whether a server of Redis 7 or 8 then throws away what scripts have written.
DEFAULTS = {
    "off resetkeys -@all": True,
    "off ~* &* +@all": False,
    "on nopass resetkeys ~shop:* +@all": True,
    "on nopass resetkeys ~rl:* -@all +@write +@read +@keyspace": False,
}
_WRITE = "redis.call('SET', KEYS[1], 1) redis.call('HSET', KEYS[2], 'a', 1) return 1"


@pytest.mark.django_db
@pytest.mark.parametrize(
    "kind",
    [
        *few(["valkey", "redis6"], "valkey"),
        *(pytest.param(kind, marks=pytest.mark.system) for kind in ("redis7", "redis8")),
    ],
)
def test_it_says_what_a_restart_throws_away(kind: str, tmp_path: Path) -> None:
    newer = kind in ("redis7", "redis8")
    (tmp_path / "s").mkdir()
    (tmp_path / "s" / "more.conf").write_text("enable-debug-command yes\n" if kind != "redis6" else "")
    server = EmbeddedServer(tmp_path / "s", aof=True, binary=server_binary(kind), options={"include": "more.conf"})
    admin = redis.Redis(port=server.port, username="admin", password="a")
    wrong = []
    try:
        with redis.Redis(port=server.port) as first:
            first.execute_command("ACL", "SETUSER", "admin", "on", ">a", "~*", "&*", "+@all")
        for default, throws_away in DEFAULTS.items():
            with user(admin, *ALL, "+acl|dryrun"), connected(server.url, USER):
                admin.execute_command("ACL", "SETUSER", "default", *default.split())
                (one,) = diagnose()
                found = {each.name: each for each in one.findings}
                app = redis.Redis(port=server.port, username=USER, password=PASSWORD)
                app.eval(_WRITE, 2, "rl:1:test:a", "rl:1:test:b")
                app.close()
                admin.execute_command("DEBUG", "LOADAOF")
                messages = check_redis_server(None, ["default"])
                rule("monthly", bills=True)
                messages += check_redis_server(None, ["default"])
                Rule.objects.all().delete()
                (state,) = RedisReading(tries=True).state().servers
                left = admin.exists("rl:1:test:a", "rl:1:test:b")
            expected = newer and throws_away
            if (left == 0) != expected or ([*found] == ["replay"]) != expected:
                wrong.append(f"{default}: {left} keys are left: {one.findings}")
            if [message.id for message in messages] != (["ratelimits.W054", "ratelimits.E054"] if expected else []):
                wrong.append(f"{default}: {messages}")
            if (state.loses is not None) != expected:
                wrong.append(f"{default}: the status page says {state.loses}")
            if expected and not (one.is_only_endangered(Part.BILLS) and "default off ~* &*" in found["replay"].mend):
                wrong.append(f"{default}: {found['replay']}")
        with user(admin, *ALL), connected(server.url, USER):
            (one,) = diagnose()
        if [each.name for each in one.findings] != (["replay-unknown"] if newer else []):
            wrong.append(f"a user who may not ask: {one.findings}")
    finally:
        admin.close()
        server.stop()
    assert wrong == []


def test_each_writing_command_of_a_script_is_tried() -> None:
    reading = {"MGET", "GET", "EXISTS", "TIME", "TYPE", "INFO", "PEXPIRE"}  # PEXPIREAT is in the file
    reading |= {"HGET", "HEXISTS", "HMGET", "HGETALL", "HLEN", "LLEN", "LINDEX", "LRANGE"}
    reading |= {"ZCARD", "ZCOUNT", "ZLEXCOUNT", "ZSCORE", "ZRANGE", "ZRANGEBYSCORE", "ZREVRANGE"}
    in_scripts = {used.name for used in USED if used.in_scripts}
    assert {name for name, *_arguments in WRITES} - {"PEXPIREAT"} == in_scripts - reading
    assert all(HASH in command for command in WRITES if command[0].startswith("H"))
