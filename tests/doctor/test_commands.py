"""Test that the doctor knows each command that the app sends, and no other one."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import redis

import ratelimits
from ratelimits.doctor.commands import USED, rights
from ratelimits.doctor.diagnosis import diagnose
from ratelimits.doctor.findings import Part
from ratelimits.engine.server import current_server, publish_version, version_in_force
from ratelimits.engine.transport.ages import IDLE
from ratelimits.simulate import clean
from ratelimits.status.redis_state import read_redis
from ratelimits.usage.ledger.drain import drain
from ratelimits.usage.ledger.verify.watermarks import verify_watermarks
from ratelimits.usage.ledger.watermark import completeness
from tests.doctor.restrictions import ALL, USER, connected, user
from tests.end_to_end.test_redis_keys import rarer
from tests.end_to_end.test_topologies import documented_rights, everything
from tests.support.engine.saying import let_be_idle
from tests.support.entry_points import begin_afresh
from tests.support.raw import RawRedis
from tests.support.usage.traffic import flow, use

APP = Path(ratelimits.__file__).parent
#: A command in a script, such as `call('HSET', …`.
_CALL = re.compile(r"\bp?call\(\s*'([A-Z]+)'")
#: The parts of the app that use a Lua file; for the files that are not here, the parts that decide.
_PARTS: dict[str, set[Part]] = {
    "sliding_log": {Part.LOGS},
    "concurrency": {Part.LEASES},
    "batch": {Part.COUNTS, Part.BILLS},
    "count": {Part.COUNTS},
    "shard_run": {Part.COUNTS},
    "spent": {Part.COUNTS},
    "full": {Part.COUNTS, Part.BILLS, Part.EDITS},
    "usage": {Part.COUNTS},
    "usage_new": {Part.COUNTS},
    "seal": {Part.BILLS},
    "pending": {Part.BILLS},
    "drop": {Part.BILLS},
    "run": {Part.LIMITS, Part.COUNTS, Part.BILLS},
    "lasting": {Part.RESTORES},
    "publish": {Part.EDITS},
    "expire": set(),  # the doctor's own
}
#: What a deciding script sends only to count.
_COUNTING = {"HINCRBY": {Part.COUNTS}}
#: What the tests send to the server through the app's connections, and redis-py itself.
_OTHERS = {"CLIENT SETINFO"}


def in_scripts() -> dict[str, set[Part]]:
    """Return the commands in the Lua files and in the Lua text that Python makes, with the parts that need them."""
    found: dict[str, set[Part]] = {}
    for path in (*(APP / "lua").rglob("*.lua"), *(APP / "engine" / "assemble").glob("*.py")):
        for name in _CALL.findall(path.read_text()):
            found.setdefault(name, set()).update(_COUNTING.get(name) or _PARTS.get(path.stem, {Part.LIMITS}))
    return found


def test_the_commands_of_scripts_are_those_of_the_lua_files() -> None:
    found = in_scripts()
    known = {used.name: set(used.in_scripts) for used in USED if used.in_scripts}
    assert set(found) == set(known)
    assert {name: parts - known[name] for name, parts in found.items() if parts - known[name]} == {}


def test_the_documented_user_has_the_rights_for_these_commands() -> None:
    documented = [right for right in documented_rights() if right.startswith("+")]
    assert sorted(documented) == sorted(rights())


@pytest.mark.django_db(transaction=True)
@pytest.mark.usefixtures("fsync_at_once")
def test_the_app_sends_no_other_commands_and_each_of_these(
    redis_client: RawRedis, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Let a user with exactly these rights do the app's jobs: the server logs what it denies, and counts the others."""
    begin_afresh(monkeypatch)
    redis_client.execute_command("ACL", "LOG", "RESET")
    with user(redis_client, *ALL), connected(redis_url, USER):
        redis_client.config_resetstat()
        jobs()
        counted = {
            name.removeprefix("cmdstat_").replace("|", " ").upper() for name in redis_client.info("commandstats")
        }
    denied = {entry[b"object"].decode().upper() for entry in redis_client.execute_command("ACL", "LOG")}
    assert {name.replace("|", " ") for name in denied} <= _OTHERS | {"CLIENT"}
    alone = {used.name for used in USED if used.alone and not used.cluster and used.fence in ("", "aof")}
    # Redis 6.2 counts no subcommands.
    assert {name for name in alone if name not in counted and name.split()[0] not in counted} == set()


def jobs() -> None:
    """Do what the app does with its server."""
    everything()
    rarer()
    publish_version(version := version_in_force())
    flow()
    completeness("default")
    use(now=None, configuration=version)
    list(verify_watermarks("default"))
    read_redis()
    server = current_server()
    let_be_idle(server.wire, 2 * IDLE)
    use(now=None, configuration=version)
    server.wire.probe()
    clean(server.wire)
    quarantine_something()


def quarantine_something() -> None:
    """Drain a batch that is not a hash."""
    server = current_server()
    client: Any = server.wire.client
    script = "redis.call('SET', KEYS[1], 'x') redis.call('RPUSH', KEYS[2], ARGV[1]) return 1"
    client.eval(script, 2, server.keyspace.batch(0, "i:1"), server.keyspace.sealed(0), "i:1")
    drain()


@pytest.mark.django_db(transaction=True)
def test_the_doctor_tries_each_command(redis_client: redis.Redis) -> None:
    redis_client.config_resetstat()
    diagnose()
    stats: Any = redis_client.info("commandstats")
    counted = {name.removeprefix("cmdstat_").replace("|", " ").upper() for name in stats}
    missing = {used.name for used in USED if not used.cluster and used.fence in ("", "aof")} - counted
    assert {name for name in missing if name.split()[0] not in counted} == set()
