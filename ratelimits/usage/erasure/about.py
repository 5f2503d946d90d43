"""Finding what names a customer: its account texts and when it had them, its keys, and its names in texts."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from django.db.models import QuerySet
from django.utils.module_loading import import_string

from ratelimits.models import Account, Customer, Move, Name
from ratelimits.models.customers import NameSpan, is_waiting, waiting_text
from ratelimits.salts import Pseudonyms
from ratelimits.usage.erasure import PARTS
from ratelimits.usage.erasure.scrub import Scrubber
from ratelimits.usage.ledger.retention.erase import ErasedNames
from ratelimits.usage.models import AlertChannel, KeyTotal, Line, ProcessTotal

#: A second in µs.
SECOND = 1_000_000


class Replaced(NamedTuple):
    """Rows in which an erasure replaces names.

    what    what the rows are, for people
    number  how many rows there are
    model   the name of their model, and
    pks     their primary keys, to replace the names in the admin's log of these rows; "" if it has none
    """

    what: str
    number: int
    model: str = ""
    pks: Collection[Any] = ()


def replaced(what: str, model: str, pks: Iterable[Any]) -> Replaced:
    """Return rows of which the admin's log can have entries."""
    found = set(pks)
    return Replaced(what, len(found), model, found)


@dataclass(frozen=True, slots=True)
class ErasedPart:
    """What another floor erases of a customer, in the tables of this floor.

    keys      yields the keys in the customer's rows
    words     yields what else names the customer in its rows, such as the account on a report
    obstacle  takes the customer and the alias of the database. Returns why it cannot be erased now; "" if it can
    preview   yields the rows in which `erase` would replace names
    erase     replaces the names, and yields the changed rows
    """

    keys: Callable[[About], Iterable[str]]
    words: Callable[[About], Iterable[str]]
    obstacle: Callable[[Customer, str], str]
    preview: Callable[[About], Iterable[Replaced]]
    erase: Callable[[About], Iterable[Replaced]]


def parts() -> Iterator[ErasedPart]:
    """Yield the parts of the floors that are installed."""
    return map(import_string, sorted(PARTS))


class About:
    """What names a customer. Read once, before anything is replaced; the customer's shards and names are locked."""

    def __init__(self, using: str, customer: Customer) -> None:
        self.using, self.customer = using, customer
        rows = list(Name.objects.using(using).filter(customer=customer).order_by("identifier", "since"))
        self.texts = sorted({row.identifier for row in rows})
        #: The texts that name the customer now.
        self.texts_now = sorted({row.identifier for row in rows if row.until is None})
        self.pseudonyms = Pseudonyms(customer.salt)
        self.names = ErasedNames([NameSpan(row.identifier, row.since, row.until) for row in rows], self.pseudonyms)

    def read_all(self) -> None:
        """Read everything that is replaced later: what is read after that has no names any more."""
        self.scrub, self._owners  # noqa: B018

    @cached_property
    def keys(self) -> frozenset[str]:
        """Return the keys in the customer's usage."""
        found: set[str] = {f"account:{text}" for text in self.texts}
        for model, condition in (
            (Line, self.names.within()),
            (ProcessTotal, self.names.within()),
            (KeyTotal, self.names.within("start")),
        ):
            rows: Any = model._default_manager.using(self.using).filter(condition)
            found.update(rows.order_by().values_list("key", flat=True).distinct())
        for part in parts():
            found.update(part.keys(self))
        return frozenset(found - {""})

    def own_keys(self, keys: set[str]) -> set[str]:
        """Return those of these keys that only this customer uses: its users and API keys."""
        users = {key for key in keys & self.keys if key.startswith(("user:", "api_key:"))}
        lines = Line.objects.using(self.using).exclude(self.names.within())
        return {key for key in users if not lines.filter(key=key).exists()}

    def account(self, text: str) -> str:
        """Return the pseudonym of an account text in a row about the customer. A text that nobody has stays."""
        return text if is_waiting(text) else self.pseudonyms.account(text)

    def account_records(self) -> QuerySet[Any]:
        """Return the records about the customer in the history of accounts."""
        history: Any = Account.history
        records: QuerySet[Any] = history.using(self.using).filter(customer=self.customer)
        return records.order_by("pk")

    def belongs(self, text: str, version: int) -> bool:
        """Return whether a row about a text was the customer's at a version of the configuration."""
        owners = self._owners.get(text, [(0, None)])
        owner = next((customer for since, customer in reversed(owners) if since <= version), owners[0][1])
        return owner == self.customer.pk

    @cached_property
    def _owners(self) -> dict[str, list[tuple[int, int | None]]]:
        """Return the customers of each text, each with the version from which on rows about the text are about it."""
        found: dict[str, list[tuple[int, int | None]]] = {}
        moves = Move.objects.using(self.using).filter(text__in=self.texts, version__gt=0).order_by("pk")
        for move in moves:
            found.setdefault(move.text, [(0, move.former_id)]).append((move.version, move.customer_id))
        names = Name.objects.using(self.using).filter(identifier__in=self.texts, until=None)
        for text, version, customer in names.values_list("identifier", "version", "customer"):
            owners = found.setdefault(text, [])
            # An erasure gives a text to a new customer without a move.
            if not owners or owners[-1][1] != customer:
                owners.append((version if owners else 0, customer))
        return found

    @cached_property
    def scrub(self) -> Scrubber:
        """Return the function that replaces all names of the customer in a value."""
        words = {*self.texts}
        accounts = [*self.texts_now, waiting_text(self.customer)]
        words.update(Account.objects.using(self.using).filter(identifier__in=accounts).values_list("name", flat=True))
        words.update(self.account_records().values_list("name", flat=True))
        channels = AlertChannel.objects.using(self.using).filter(account__identifier__in=accounts)
        for email, url in channels.values_list("email", "webhook_url"):
            words.update((email, url))
        for part in parts():
            words.update(part.words(self))
        return Scrubber(self.pseudonyms, {word for word in words if word and not is_waiting(word)}, self.keys)
