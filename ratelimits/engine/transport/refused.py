"""Say which command a server refused, why, and which right would allow it.

A server refuses a command for one of three reasons: the ACL of its user lacks the command, or lacks the Redis key, or
the server does not have the command at all (a hosted server can disable or rename it).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum

from redis.exceptions import AuthenticationError, ResponseError

from ratelimits.engine import memory


class Reason(StrEnum):
    """Why a server refused a command."""

    #: The user's ACL lacks the command.
    COMMAND = "command"
    #: The user's ACL lacks a Redis key that the command names.
    KEY = "key"
    #: The server does not know the command, or does not offer it to anybody.
    MISSING = "missing"


@dataclass(frozen=True, slots=True)
class RefusedCommand:
    """A command that a server refused."""

    #: The command in capital letters, such as "CONFIG GET"; "" if nobody knows it.
    command: str
    reason: Reason
    #: The words for `ACL SETUSER <user>` that allow the command; "" if no right allows it.
    acl: str
    #: The server's own words.
    error: str

    def __str__(self) -> str:
        command = self.command or "a command of a script"
        if self.reason is Reason.MISSING:
            return f"the server does not have {command}: it is disabled or renamed ({self.error})"
        what = f"{command} for this Redis key" if self.reason is Reason.KEY else command
        line = f": ACL SETUSER <user> {self.acl}" if self.acl else ""
        return f"the server's ACL does not allow {what}{line} ({self.error})"


_QUOTED = r"""[`'"]?(?P<command>[\w|.-]+)[`'"]?"""
#: How servers say it. The errors of scripts contain the server's error, but Redis 6.2 leaves out the command's name.
_SAID = (
    (Reason.COMMAND, re.compile(rf"no permissions to run the {_QUOTED} command")),
    (Reason.COMMAND, re.compile(r"can't run this command or subcommand")),
    (Reason.KEY, re.compile(r"[Nn]o permissions to access (a|one of the) key|can't access at least one of the keys")),
    (Reason.MISSING, re.compile(r"[Uu]nknown (Redis )?command called from|[Uu]nknown subcommand")),
    (Reason.MISSING, re.compile(rf"[Uu]nknown command {_QUOTED}")),
    (Reason.MISSING, re.compile(rf"[Uu]nsupported command {_QUOTED}|Command is not available: '(?P<name>[\w |]+)'")),
    (Reason.MISSING, re.compile(r"[Cc]ommand (is )?(not allowed|disabled|not supported)|command not (allowed|found)")),
)


def refused(error: BaseException, command: str = "", keys: str = "~rl:*") -> RefusedCommand | None:
    """Return what the server refused; None if the error has another meaning.

    `command` is the command that was sent: it is used if the error does not name one. A script sends other commands
    than its caller, so leave it out for EVAL and EVALSHA, except if the script sends only this command. `keys` is the
    pattern of the Redis keys that the user needs.
    """
    if not isinstance(error, ResponseError) or memory.is_refusal(error):
        return None  # a full server says "command not allowed" too
    text = str(error)
    for reason, said in _SAID:
        if (found := said.search(text)) is not None:
            groups = found.groupdict()
            named = groups.get("command") or groups.get("name") or ""
            # A server that names only "CONFIG" says less than the caller, who sent "CONFIG GET".
            sent, seen = command.upper(), named.replace("|", " ").upper()
            name = sent if not seen or sent.startswith(f"{seen} ") else seen
            return RefusedCommand(name, reason, _acl(reason, name, keys), text)
    return None


#: How servers say that a connection has no valid user or password. Some say it only with the first command.
_NO_LOGIN = re.compile(r"^(NOAUTH|WRONGPASS) ")


def cause(error: BaseException) -> str:
    """Return a clause that says why Redis could not do what was asked: it does not answer, or what it answers instead.

    Take the errors of redis-py, `Unavailable` and OSError.
    """
    said = str(error).removesuffix(".")
    if isinstance(error, AuthenticationError) or _NO_LOGIN.search(said):
        return f"Redis does not accept the user or the password: {said}"
    if (found := refused(error)) is not None:
        return f"Redis refuses a command: {found}"
    if isinstance(error, ResponseError):
        return f"{'Redis has no memory left' if memory.is_refusal(error) else 'Redis answers with an error'}: {said}"
    return f"Redis does not answer: {said}"


def _acl(reason: Reason, command: str, keys: str) -> str:
    if reason is Reason.KEY:
        return keys
    if reason is Reason.MISSING or not command:
        return ""
    return "+" + command.lower().replace(" ", "|")
