"""Customers and their names: which account texts a customer has, and since when."""

from __future__ import annotations

from ratelimits.models import Account, Customer, Name
from ratelimits.models.customers import WAITING
from ratelimits.usage.models import Line


def known_text(using: str, name: str) -> str | None:
    """Return an account text that `named_now` knows, from what a person wrote: an account text, or a customer's token.

    Return None if nobody has this text or this token.
    """
    if not name or Name.objects.using(using).filter(identifier=name).exists():
        return name
    token = name.lower().removeprefix(WAITING)
    if Customer.objects.using(using).filter(token=token).exists():
        return f"{WAITING}{token}"
    has_row = Account.objects.using(using).filter(identifier=name).exists()
    # The tally makes the customer of a new text.
    return name if has_row or Line.objects.using(using).filter(account=name).exists() else None
