"""Customers with their names, as bills know them: whose usage a report states, and under which text.

`named` finds customers, `named_now` those whom account texts name now, and `accounts_now` the accounts of these.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import Any, NamedTuple

from django.utils.translation import gettext as _

from ratelimits import moments
from ratelimits.models.accounts import Account
from ratelimits.models.customers import WAITING, Customer, Name, NameSpan, customers_of_rows, unsaved_token

#: Maximum number of customers or texts in one query.
_CHUNK = 500
_SECOND = 1_000_000


class TextSpan(NamedTuple):
    """An account text, and the span in which its usage belongs to a customer (µs since 1970 UTC; without the end)."""

    text: str
    start: int
    end: int


class NamedCustomer(NamedTuple):
    """A customer and its names.

    account  the text on its reports: the oldest name that it still has; if no text names the customer now, the last one
             that did
    token    the token of the customer
    pk       its primary key; None if usage of the text is not tallied yet, so that the customer does not exist yet
    names    all its names, oldest first
    salt     the salt with which its keys are hidden in the ids of report lines; "" before it exists, and once it was
             erased
    """

    account: str
    token: str
    pk: int | None
    names: tuple[NameSpan, ...]
    salt: str = ""

    @property
    def row(self) -> Customer:
        """Return the customer's row without a query."""
        return Customer(pk=self.pk, token=self.token, salt=self.salt)

    @property
    def present(self) -> list[str]:
        """Return the texts that name the customer now; the text of its waiting rows if there are none."""
        return [name.text for name in self.names if name.until is None] or [f"{WAITING}{self.token}"]

    @property
    def billed_account(self) -> str:
        """Return the account under which billing systems know the customer; "" if no text names the customer now.

        The last text that did perhaps names another customer, who must not pay.
        """
        return self.account if any(name.until is None for name in self.names) else ""

    @property
    def texts(self) -> set[str]:
        """Return the texts that rows about the customer have ever had in the table of accounts."""
        texts = {name.text for name in self.names}
        return texts if self.was_always(0) else {*texts, f"{WAITING}{self.token}"}

    def was_always(self, since: int) -> bool:
        """Return whether the customer has had its present texts, and no others, since a moment (s since 1970 UTC)."""
        return bool(self.names) and all(name.since <= since and name.until is None for name in self.names)

    def texts_at(self, at: int) -> list[str]:
        """Return the texts that name the customer at a moment (µs since 1970 UTC), as `present` does."""
        found = [span.text for span in self.spans(at, at + 1)]
        return found or [f"{WAITING}{self.token}"]

    def spans(self, start: int, end: int) -> list[TextSpan]:
        """Return the texts that name the customer between two moments (µs since 1970 UTC), each with its span."""
        if len(self.names) == 1 and self.names[0][1:] == (0, None) and 0 <= start < end:
            # Most customers have had one text for ever. A closing asks for each line, so their answer must be quick.
            return [TextSpan(self.names[0].text, start, end)]
        spans = (
            TextSpan(
                name.text,
                max(start, name.since * _SECOND),
                end if name.until is None else min(end, name.until * _SECOND),
            )
            for name in self.names
        )
        return [span for span in spans if span.start < span.end]

    def only_text(self, start: int, end: int) -> str | None:
        """Return the only text that names the customer between two moments; None if there are several, or a hole."""
        spans = self.spans(start, end)
        return spans[0].text if len(spans) == 1 and spans[0][1:] == (start, end) else None


def named(using: str, pks: Iterable[int], texts: Iterable[str] = ()) -> list[NamedCustomer]:
    """Return the customers with these primary keys, sorted by account and token.

    For each of `texts`, which must name nobody yet, also return the customer that the tally will make.
    """
    found = [customer for chunk in _chunks(pks) for customer in _read(using, pk__in=chunk)]
    found += [NamedCustomer(text, unsaved_token(text), None, (NameSpan(text, 0, None),)) for text in texts]
    return sorted(found)


def named_now(using: str, texts: Collection[str]) -> dict[str, NamedCustomer]:
    """Return the customer whom each account text names now. A text of waiting rows stands for its customer too."""
    pks = customers_of_rows(using, texts)
    by_pk = {customer.pk: customer for customer in named(using, set(pks.values()))}
    nameless = {customer.account: customer for customer in named(using, (), set(texts) - pks.keys())}
    return nameless | {text: by_pk[pk] for text, pk in pks.items()}


def accounts_now(using: str, texts: Collection[str]) -> dict[str, Account]:
    """Return the account whose plan and terms hold for each account text now. Leave out texts without one.

    The account's identifier is perhaps another text of the same customer.
    """
    customers = named_now(using, texts)
    found: dict[str, Account] = {}
    for chunk in _chunks({text for customer in customers.values() for text in customer.present}):
        found |= {row.identifier: row for row in Account.objects.using(using).filter(identifier__in=chunk)}
    rows = {text: [found[one] for one in customer.present if one in found] for text, customer in customers.items()}
    return {text: min(of_text, key=lambda row: row.pk) for text, of_text in rows.items() if of_text}


def former_accounts(using: str, texts: Collection[str]) -> dict[str, str]:
    """Return sentences about the texts of deleted accounts whose customers still have them, by text."""
    former = Account.history.using(using).filter(identifier__in=texts, history_type="-")
    former = former.order_by("history_date").values_list("identifier", "customer", "history_date")
    deleted = {(text, customer): at for text, customer, at in (former if texts else ())}
    names = Name.objects.using(using).filter(identifier__in={text for text, _pk in deleted}, until=None)
    text = _(
        "An account %(text)s was deleted at %(when)s. Its customer %(customer)s still has this text, so the new account"
        " is about the same customer, with its usage and its bills. If it is somebody else, move the text to a new"
        " customer after you have saved."
    )
    return {
        name.identifier: text % {"text": name.identifier, "when": moments.local_text(at), "customer": name.customer}
        for name in names.select_related("customer")
        if (at := deleted.get((name.identifier, name.customer_id))) is not None
    }


def of_tokens(using: str, tokens: Iterable[str]) -> dict[str, NamedCustomer]:
    """Return the customers with these tokens. For a token that no customer has, return a customer without names."""
    wanted = set(tokens)
    found = {token: NamedCustomer(f"{WAITING}{token}", token, None, ()) for token in wanted}
    for chunk in _chunks(wanted):
        found |= {customer.token: customer for customer in _read(using, token__in=chunk)}
    return found


def billed_accounts(using: str) -> dict[str, str]:
    """Return the accounts under which billing systems know the customers whose texts have changed, by token."""
    moved = Name.objects.using(using).exclude(until=None).order_by().values_list("customer", flat=True)
    return {customer.token: customer.billed_account for customer in named(using, set(moved))}


def _chunks(items: Iterable[Any]) -> Iterator[list[Any]]:
    all_items = sorted(items)
    return (all_items[first : first + _CHUNK] for first in range(0, len(all_items), _CHUNK))


def _read(using: str, **filters: Any) -> Iterator[NamedCustomer]:
    customers = Customer.objects.using(using).filter(**filters).values_list("pk", "token", "salt")
    tokens = {pk: (token, salt) for pk, token, salt in customers}
    names: dict[int, list[NameSpan]] = {pk: [] for pk in tokens}
    # Of names that begin at the same quarter, the one that was given first. (`customer__in` would be slow: Django
    # prepares each of its values as a relation.)
    rows = Name.objects.using(using).filter(customer__pk__in=list(tokens)).order_by("since", "version", "identifier")
    for pk, text, since, until in rows.values_list("customer", "identifier", "since", "until"):
        names[pk].append(NameSpan(text, since, until))
    for pk, (token, salt) in tokens.items():
        yield NamedCustomer(_account(names[pk], token), token, pk, tuple(names[pk]), salt)


def _account(names: list[NameSpan], token: str) -> str:
    """Return the text on a customer's reports. A further text does not change it."""
    for name in names:
        if name.until is None:
            return name.text
    return max(names, key=lambda name: name.until or 0).text if names else f"{WAITING}{token}"
