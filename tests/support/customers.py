"""Find the customers of account texts, for tests."""

from __future__ import annotations

from collections.abc import Iterable

from ratelimits.models import Customer
from ratelimits.models.customers import TextAndBin, customer_at, names_of


def present(using: str, texts: Iterable[str]) -> dict[str, Customer]:
    """Return the customer whom each account text names now."""
    rows = Customer.objects.using(using)
    return {text: rows.get(names__identifier=text, names__until=None) for text in texts}


def resolve(using: str, uses: Iterable[TextAndBin]) -> dict[TextAndBin, Customer]:
    """Return the customer of each account text at a bin. Leave out texts that have no customer then."""
    wanted = list(uses)
    names, customers = names_of(using, {text for text, _bin in wanted}), Customer.objects.using(using).in_bulk()
    found = {(text, bin_): customer_at(names.get(text, ()), bin_) for text, bin_ in wanted}
    return {use: customers[pk] for use, pk in found.items() if pk is not None}
