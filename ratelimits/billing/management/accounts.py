"""The option --account of commands: an account text, or the token of a customer."""

from __future__ import annotations

from django.core.management.base import BaseCommand

from ratelimits.conf import conf
from ratelimits.usage.customers import known_text


def chosen_account(command: BaseCommand, account: str | None) -> str | None:
    """Return the account text of the customer with this token; otherwise the account. Say so if nobody has it."""
    known = None if account is None else known_text(conf.DATABASE, account)
    if account is not None and known is None:
        command.stderr.write(
            f"{account!r} is neither an account with usage, nor in the table of accounts, nor the token of a customer:"
            " check the spelling."
        )
    return account if known is None else known
