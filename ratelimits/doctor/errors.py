"""Turn a server's error into a finding: which command it refused, and what would change it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from redis.exceptions import (
    AuthenticationError,
    MovedError,
    NoPermissionError,
    ReadOnlyError,
    RedisError,
    ResponseError,
)

from ratelimits.doctor.commands import key_patterns
from ratelimits.doctor.findings import Part, ServerFinding, installed, more_memory
from ratelimits.engine import memory
from ratelimits.engine.server import Server
from ratelimits.engine.transport.connection import Unavailable
from ratelimits.engine.transport.refused import Reason, RefusedCommand, refused


@dataclass(frozen=True, slots=True)
class Who:
    """The user as whom the app connects, and the pattern of the Redis keys that the user needs."""

    user: str
    keys: str

    def right(self, acl: str) -> str:
        """Return the command that gives the user a right."""
        return f"ACL SETUSER {self.user} {acl}"


def who_asks(server: Server, client: Any) -> tuple[Who, Who]:
    """Return the user of the app, with the pattern of the project's Redis keys, and with that of simulations."""
    user = _user(client)
    project, simulations = key_patterns(server.keyspace.namespace)
    return Who(user, project), Who(user, simulations)


def _user(client: Any) -> str:
    """Return the name of the user as whom a client connects. If a credential provider does not say it: "<user>"."""
    options = client.connection_pool.connection_kwargs
    provider = options.get("credential_provider")
    if provider is None:
        return str(options.get("username") or "default")
    try:
        said = client.execute_command("ACL WHOAMI")
        return said.decode() if isinstance(said, bytes) else str(said)
    except (RedisError, Unavailable, OSError):  # the user may not ask, or the server does not answer
        pass
    try:
        credentials = provider.get_credentials()
    except Exception:  # noqa: BLE001  (the provider is code of the project, and its failure is reported by the connection)
        return "<user>"
    # A password alone is that of the user `default`.
    return str(credentials[0]) if len(credentials) > 1 else "default"


def of_command(error: BaseException, command: str, parts: frozenset[Part], who: Who) -> ServerFinding | None:
    """Return a finding if the server refused this command; None if the error has another meaning."""
    found = refused(error, command, who.keys)
    return of_refusal(found, parts, who) if found is not None else _of_state(error, parts)


def of_refusal(found: RefusedCommand, parts: frozenset[Part], who: Who) -> ServerFinding:
    """Return the finding for a refused command."""
    if found.reason is Reason.KEY:
        why = f"The server's user {who.user} may not touch the Redis keys {who.keys.removeprefix('~')}: {found.error}"
        return ServerFinding(f"keys:{found.acl}", parts, why, who.right(found.acl), found.acl)
    name = f"command:{found.command or '?'}"
    command = found.command or "a command of a script"
    if found.reason is Reason.MISSING:
        why = f"The server does not have {command}: {found.error}"
        mend = (
            f"Remove `rename-command {command.split(' ')[0]}` from the server's configuration. If the server is hosted,"
            f" its provider has disabled the command (docs/servers.md)."
        )
        return ServerFinding(name, parts, why, mend)
    why = f"The server's user {who.user} may not send {command}: {found.error}"
    mend = who.right(found.acl) if found.acl else "Give the user this right"
    return ServerFinding(name, parts, why, mend, found.acl)


def _of_state(error: BaseException, parts: frozenset[Part]) -> ServerFinding | None:
    """Return a finding if the server refused the command because of its state."""
    text = str(error)
    if isinstance(error, ReadOnlyError) or "READONLY" in text:
        return ServerFinding(
            "replica",
            parts,
            f"The server is a read-only replica: it refuses writes: {text}",
            "Name the primary in the LOCATION of the cache, or use Sentinel (docs/scaling.md).",
        )
    if isinstance(error, MovedError) or text.startswith("MOVED "):
        return ServerFinding(
            "cluster",
            parts,
            f"The server is a node of a Redis Cluster, but the cache does not connect to the whole cluster: {text}",
            "Connect the cache as docs/scaling.md#redis-cluster says.",
        )
    if isinstance(error, ResponseError) and memory.is_refusal(error):
        return ServerFinding(
            "full",
            parts,
            f"The memory of the server is full: {text}",
            more_memory(),
        )
    if any(word in text for word in ("NOREPLICAS", "MISCONF")):
        return ServerFinding(
            "writes", parts, f"The server refuses writes: {text}", "Look at the server's log and its disk."
        )
    return None


def of_connection(error: Exception, who: Who) -> ServerFinding:
    """Return the finding for a server to which nothing could be sent."""
    if isinstance(error, AuthenticationError) or "NOAUTH" in str(error) or "WRONGPASS" in str(error):
        return ServerFinding(
            "login",
            frozenset(installed()),
            f"The server does not accept the user {who.user} with this password: {error}",
            "Write the user and the password into the LOCATION of the cache: redis://user:password@host:port/0.",
        )
    if isinstance(error, NoPermissionError):
        found = refused(error)
        if found is not None:
            return of_refusal(found, frozenset(installed()), who)
    if isinstance(error, ResponseError):
        return ServerFinding(
            "answer",
            frozenset(installed()),
            f"The server answers a command that each part of the app sends with an error: {error}",
            "Look at this message, and at the page of the server's kind in docs/servers.md.",
        )
    return ServerFinding(
        "connection",
        frozenset(installed()),
        f"The server does not answer: {type(error).__name__}: {error}",
        _mend_of_connection(str(error)),
    )


def _mend_of_connection(said: str) -> str:
    mend = "Look at the LOCATION of the cache, at the network, and at RATELIMITS['TIMEOUT']."
    if "CERTIFICATE_VERIFY_FAILED" in said or "certificate verify failed" in said:
        return (
            "Name the file with the certificate of the server's authority (CA) in the LOCATION of the cache:"
            " rediss://host:port/0?ssl_ca_certs=/path/ca.pem."
        )
    if "reset by peer" in said or "closed by server" in said:
        return f"If the port expects TLS, begin the LOCATION of the cache with rediss://, not redis://. {mend}"
    return mend
