"""Find out who makes a request: its user, API key, account and address, each with its name in limits and ledger."""

from __future__ import annotations

from ratelimits.identity.requests import (
    Identity,
    aidentify,
    api_key_of,
    identify,
    is_account,
    kinds_in_account,
    user_of_account,
)
from ratelimits.identity.written import NO_CLIENT, with_account
from ratelimits.naming import NotAName, name_of

__all__ = [
    "NO_CLIENT",
    "Identity",
    "NotAName",
    "aidentify",
    "api_key_of",
    "identify",
    "is_account",
    "kinds_in_account",
    "name_of",
    "user_of_account",
    "with_account",
]
