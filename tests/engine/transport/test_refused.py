"""Test that a refused command is named, with the right that allows it, by each server's own errors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest
import redis
from redis.exceptions import AuthenticationError, OutOfMemoryError, ResponseError
from redis.exceptions import ConnectionError as RedisConnectionError

from ratelimits.engine.transport.refused import Reason, cause, refused

#: The user may send each command but these.
DENIED = ("-info", "-config", "-script", "-hset")


@pytest.fixture
def limited(redis_client: redis.Redis, redis_url: str) -> Iterator[redis.Redis]:
    """Return a client of a user with few rights and some Redis keys."""
    redis_client.execute_command("ACL", "SETUSER", "few", "reset", "on", ">pw", "~own:*", "+@all", *DENIED)
    with closing(redis.Redis.from_url(redis_url.replace("redis://", "redis://few:pw@"))) as client:
        yield client
    redis_client.execute_command("ACL", "DELUSER", "few")


@pytest.mark.parametrize(
    ("sent", "command", "reason", "acl"),
    [
        (("INFO",), "INFO", Reason.COMMAND, "+info"),
        (("CONFIG", "GET", "appendfsync"), "CONFIG GET", Reason.COMMAND, "+config|get"),
        (("SCRIPT", "LOAD", "return 1"), "SCRIPT LOAD", Reason.COMMAND, "+script|load"),
        (("EVAL", "return redis.call('HSET', KEYS[1], 'a', 'b')", "1", "own:1"), "HSET", Reason.COMMAND, "+hset"),
        (("EVAL", "return redis.call('GET', 'x')", "0"), "GET", Reason.KEY, "~own:*"),
        (("GET", "x"), "GET", Reason.KEY, "~own:*"),
        (("NONE", "x"), "NONE", Reason.MISSING, ""),
        (("EVAL", "return redis.call('NONE')", "0"), "NONE", Reason.MISSING, ""),
    ],
)
def test_the_server_says_what_it_refuses(
    limited: redis.Redis, sent: tuple[str, ...], command: str, reason: Reason, acl: str
) -> None:
    with pytest.raises(ResponseError) as caught:
        limited.execute_command(*sent)
    found = refused(caught.value, command, "~own:*")
    assert found is not None
    assert (found.command, found.reason, found.acl) == (command, reason, acl)
    assert command in str(found)
    assert f"ACL SETUSER <user> {acl}" in str(found) or not acl


@pytest.mark.parametrize(
    ("text", "command"),
    [
        ("unknown command `CONFIG`, with args beginning with: `GET`, ", "CONFIG GET"),
        ("Command is not available: 'CONFIG GET'. See the documentation", "CONFIG GET"),
        ("unsupported command 'CONFIG'", "CONFIG GET"),
        ("CONFIG command not allowed", "CONFIG GET"),
    ],
)
def test_hosted_servers_and_proxies_have_their_own_words(text: str, command: str) -> None:
    found = refused(ResponseError(text), "CONFIG GET")
    assert found is not None
    assert (found.command, found.reason, found.acl) == (command, Reason.MISSING, "")


@pytest.mark.parametrize(
    "error",
    [
        ResponseError("wrong number of arguments for 'get' command"),
        ResponseError("READONLY You can't write against a read only replica."),
        RedisConnectionError("no permissions to run the 'info' command"),
    ],
)
def test_another_error_refuses_no_command(error: Exception) -> None:
    assert refused(error, "GET") is None


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (RedisConnectionError("Error 111"), "Redis does not answer: Error 111"),
        (OSError("no route"), "Redis does not answer: no route"),
        (
            ResponseError("NOPERM this user has no permissions to run the 'eval' command"),
            "Redis refuses a command: the server's ACL does not allow EVAL: ACL SETUSER <user> +eval (NOPERM ",
        ),
        (OutOfMemoryError("command not allowed"), "Redis has no memory left: command not allowed"),
        (ResponseError("OOM command not allowed when used memory > 'maxmemory'."), "Redis has no memory left: OOM "),
        (ResponseError("MISCONF Errors writing to the AOF file"), "Redis answers with an error: MISCONF "),
        (AuthenticationError("invalid username-password pair"), "Redis does not accept the user or the password: "),
        (ResponseError("NOAUTH Authentication required."), "Redis does not accept the user or the password: NOAUTH "),
    ],
)
def test_the_true_cause_is_said(error: Exception, said: str) -> None:
    assert cause(error).startswith(said)
