"""A command about a single key: it shows and resets limits, grants more capacity, and blocks or allows the key.

It also blocks or allows an address or a network.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

from django.core.exceptions import NON_FIELD_ERRORS, ValidationError
from django.core.management.base import CommandError, CommandParser
from django.db import DatabaseError

from ratelimits import moments, rules, unknown_names
from ratelimits.conf import conf
from ratelimits.management.authors import author
from ratelimits.management.help import ExplainedCommand
from ratelimits.management.numbers import whole_number
from ratelimits.management.typed_moments import typed_moment
from ratelimits.models import Access
from ratelimits.models.access.targets import canonical
from ratelimits.models.fields.durations import seconds
from ratelimits.models.history import MAX_REASON
from ratelimits.models.keys import COVERS
from ratelimits.quota.standings import UNAVAILABLE, LiveLimit, live_limits, with_text
from ratelimits.rules import AppliedRule
from ratelimits.rules.grants import grant
from ratelimits.status.keys import all_tables, known_keys, no_effect_text, no_owner_text, typed_key
from ratelimits.status.operating import NO_ACCOUNT, NothingDoneError, identity_of, reset

#: The exit status if Redis or the database does not answer.
NO_ANSWER = 3


class Command(ExplainedCommand):
    help = (
        "Shows how many permits a key has left, resets a limit, grants a key more capacity until a given time, and"
        " blocks or allows a key, address or network. The exit status is 1 if nothing was done, 2 if the arguments are"
        " not valid, 3 if Redis or the database does not answer."
    )
    examples = (
        "show user:42",
        "reset user:42 burst --reason ticket-7",
        "grant account:acme monthly 1000 --until 2026-12-01 --reason upgrade",
        "show header:X-Tenant=acme",
        "block 203.0.113.0/24 --reason attack",
        "unblock 203.0.113.0/24 --reason over",
    )
    exit_codes = {
        0: "done",
        1: "nothing was done",
        2: "wrong arguments",
        3: "Redis or the database does not answer",
    }

    def add_arguments(self, parser: CommandParser) -> None:
        commands = parser.add_subparsers(dest="command", required=True)
        for name, text in (
            ("show", "show the limits of a key, and the block or allow that is in force"),
            ("reset", "give a key all permits of a rule again; the usage so far is still counted and billed"),
            ("grant", "give a key more capacity under a rule until a given time"),
        ):
            command = commands.add_parser(name, help=text)
            command.add_argument(
                "key",
                help="such as user:42, api_key:4, account:acme, ip:203.0.113.9 or header:X-Tenant=acme; or a name"
                " that only one key has",
            )
            command.add_argument(
                "--account",
                default="",
                help="the account of the user or API key; if there is no account, write a hyphen (-)",
            )
            if name != "show":
                command.add_argument("rule", help="name of the rule")
                _add_reason_and_author(command)
            if name == "grant":
                command.add_argument("extra", type=whole_number, help="permits to add to the capacity")
                command.add_argument("--until", required=True, type=_moment, help=_WHEN)
        for name, text in (
            ("block", "refuse every request"),
            ("allow", "exempt requests from all rules; exempted requests are not billed"),
        ):
            command = commands.add_parser(name, help=text)
            command.add_argument("target", help="a key, an address or a network such as 203.0.113.0/24")
            command.add_argument("--until", type=_moment, help=f"{_WHEN}; default: no end")
            command.add_argument("--from", dest="begins", type=_moment, help=f"{_WHEN}; default: now")
            _add_reason_and_author(command)
            if name == "block":
                command.add_argument(
                    "--status",
                    type=whole_number,
                    default=403,
                    choices=Access.Status.values,
                    help="the HTTP status that the client receives; default: 403",
                )
                command.add_argument("--message", default="", help="the reason that the client receives")
        command = commands.add_parser("unblock", help="end the block or allow that is in force")
        command.add_argument("target", help="the key, address or network, as it was written for block or allow")
        _add_reason_and_author(command)

    def handle(self, *args: Any, **options: Any) -> None:
        try:
            getattr(self, f"_{options['command']}")(options)
        except ValidationError as error:
            raise CommandError("\n".join(_messages(error))) from error
        except NothingDoneError as error:
            raise CommandError(str(error)) from error
        except (*UNAVAILABLE, TimeoutError, DatabaseError) as error:
            raise CommandError(f"Nothing was done: {error}", returncode=NO_ANSWER) from error

    def _show(self, options: dict[str, Any]) -> None:
        key = _key(options["key"])
        identity = identity_of(key, options["account"])
        if identity.account is not None:
            self.stdout.write(f"account: {identity.account_id}")
        row = rules.reload().access(identity)
        if row is not None:
            access = Access.objects.using(conf.DATABASE).get(pk=row.pk)
            self.stdout.write(f"{access}, {_validity_text(access)}: {access.reason}")
        limits, error = live_limits(identity)
        if error is not None:
            raise error
        for limit in with_text(limits, key):
            self.stdout.write(_limit_text(limit))

    def _reset(self, options: dict[str, Any]) -> None:
        user, key = author(options["by"]), _existing_key(options)
        row = reset(key, options["rule"], options["reason"], account=options["account"], by=user)
        self.stdout.write(f"{row.key} has all permits of {row.rule} again.")

    def _grant(self, options: dict[str, Any]) -> None:
        key = _existing_key(options)
        rule, extra, until = options["rule"], options["extra"], options["until"]
        owner = options["account"] or identity_of(key).account_id
        for override in grant(key, rule, extra, until, options["reason"], account=owner, by=author(options["by"])):
            self.stdout.write(f"{override}: capacity {override.capacity}, {_validity_text(override)}")

    def _block(self, options: dict[str, Any]) -> None:
        user = author(options["by"])
        row: Any = Access(
            effect=options["command"],
            target=options["target"],
            reason=options["reason"],
            valid_from=options["begins"],
            valid_until=options["until"],
            status=options.get("status", 403),  # `allow` has neither --status nor --message.
            message=options.get("message", ""),
        )
        row.full_clean()
        for warning in filter(None, (no_effect_text(row.target), *unknown_names.in_row(row))):
            self.stderr.write(self.style.WARNING(warning))
        row._history_user, row._change_reason = user, options["reason"][:MAX_REASON]
        row.save(using=conf.DATABASE)
        self.stdout.write(f"{row}, {_validity_text(row)}")

    _allow = _block

    def _unblock(self, options: dict[str, Any]) -> None:
        user, target, now = author(options["by"]), canonical(options["target"]), moments.now()
        rows: list[Any] = [
            row for row in Access.objects.using(conf.DATABASE).filter(target=target) if row.in_force(now)
        ]
        if not rows:
            raise NothingDoneError(f"No block or allow of {target} is in force.")
        for row in rows:
            row._history_user = user
            row.end(options["reason"])
            self.stdout.write(f"{row}: ended.")


def _key(text: str) -> str:
    """Return the key that a text means. The text is a key, or a part of a key or of a name.

    Raise NothingDoneError if the text means no key, or more than one key.
    """
    key = typed_key(text)
    if key is not None:
        return key
    if text.partition(":")[0] in COVERS:
        return text  # The text begins like a key, but is not one, such as "ip:x". `identity_of` reports this error.
    found = known_keys(text, all_tables()).keys
    if not found:
        raise NothingDoneError(f"No key or name contains “{text}”: write a key, such as account:acme or user:42.")
    if len(found) > 1:
        names = ", ".join(f"{one.key} ({one.name})" if one.name else one.key for one in found)
        raise NothingDoneError(f"Several keys match “{text}”. Write one of them: {names}.")
    return found[0].key


def _existing_key(options: dict[str, Any]) -> str:
    """Return the key of the command line. Raise NothingDoneError if nobody has the key or the account."""
    key, account = _key(options["key"]), options["account"]
    problem = no_owner_text(key) or (no_owner_text(f"account:{account}") if account not in ("", NO_ACCOUNT) else "")
    if problem:
        raise NothingDoneError(problem)
    return key


def _limit_text(limit: LiveLimit) -> str:
    """Return a line of text about a limit: its rule, its key, and the permits left. Redis must have answered."""
    rule, standing = limit.why.rule, limit.standing
    if not isinstance(rule, AppliedRule) or standing is None:
        return f"{limit.why.row.name}: {'off, by an override' if rule is None else 'cannot be read'}"
    plan = f", plan {rule.plan}" if rule.plan else ""
    override = ", override" if limit.why.overrides else ""
    permits, _microseconds = rule.algorithm.quota
    return (
        f"{rule.name} ({rule.mode.name.lower()}{plan}{override}), counted for {limit.key}:"
        f" {standing.remaining} of {permits} {rule.meter} left,"
        f" all permits again in {standing.reset_after:.0f} s"
    )


_WHEN = "a moment such as 2026-11-30T18:00+01:00 or 2026-11-30, or a length of time from now such as 2h"


def _add_reason_and_author(command: CommandParser) -> None:
    command.add_argument("--reason", required=True, help="the reason, which the history shows to your colleagues")
    command.add_argument("--by", help="the user name of the person who decided this, for the history")


def _moment(text: str) -> datetime:
    """Return the moment that a text names. Raise ValueError if it does not name a moment: argparse shows this error."""
    if (moment := typed_moment(text)) is not None:
        return moment
    try:
        return moments.now() + timedelta(seconds=float(seconds(text)))
    except (ValidationError, OverflowError) as error:
        raise ValueError from error


_moment.__name__ = "moment"  # The error message of argparse contains this name: "invalid moment value".


def _validity_text(row: Any) -> str:
    begins = f"from {row.valid_from:%Y-%m-%d %H:%M:%S %Z} " if row.valid_from else ""
    return f"{begins}until {row.valid_until:%Y-%m-%d %H:%M:%S %Z}" if row.valid_until else f"{begins}without an end"


def _messages(error: ValidationError) -> list[str]:
    """Return the text of each error. If the error belongs to a field, the text begins with the field's name."""
    if not hasattr(error, "error_dict"):
        return list(error.messages)
    return [
        message if field == NON_FIELD_ERRORS else f"{field}: {message}"
        for field, messages in error.message_dict.items()
        for message in messages
    ]
