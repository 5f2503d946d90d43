"""Customers: who pays, for ever. Account texts, such as "acme", are the names of customers.

An account text is what RATELIMITS["ACCOUNT"] returns for a request; "" is the text of anonymous usage. Requests, the
ledger and the rules know only texts. Bills are about customers: see `ratelimits.models.accounts.named`.

A customer is made when an account is saved, or when usage of a new text is tallied. Customers are never deleted. Each
row of `Name` says whose name a text is from a moment on. At a bin, a text names the customer of its newest row that has
begun. So it never names two customers at once, whatever is written, and there is no hole.
`ratelimits.usage.customers.move` gives a text to another customer, and adds a row of `Move`.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from base64 import b32encode
from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple

from django.conf import settings
from django.db import models, transaction
from django.utils.translation import gettext_lazy as _

from ratelimits.engine.keys import BIN_SECONDS, LONGEST_NAME
from ratelimits.models import users
from ratelimits.models.keys import key_shard
from ratelimits.models.versions import Edit, Tombstone
from ratelimits.moments.columns import UTCDateTimeField
from ratelimits.salts import SALT_BYTES, new_salt

#: Maximum number of names in one query.
_CHUNK = 1000
#: An account text, and the start of a bin of usage (s since 1970 UTC).
TextAndBin = tuple[str, int]


def new_token() -> str:
    """Return a random text of 16 letters and digits. The ids of reports and their lines start with it."""
    return b32encode(secrets.token_bytes(10)).decode().lower()


#: The rows of a customer have this text and the customer's token while the customer has no text. No request has it,
#: since the token is random.
WAITING = "=~"
_WAITING_TEXT = re.compile(f"{WAITING}[a-z2-7]{{16}}")


class Customer(models.Model):
    """Who pays. A customer keeps its token for ever, also if its names or its account row change."""

    token = models.CharField(_("token"), max_length=16, unique=True, default=new_token, editable=False)
    #: An erasure makes the pseudonyms of the customer's names with this salt, and deletes it: "" after an erasure.
    salt = models.CharField(_("salt"), max_length=2 * SALT_BYTES, default=new_salt, blank=True, editable=False)

    class Meta:
        verbose_name = _("customer")
        verbose_name_plural = _("customers")
        default_permissions = ()

    def __str__(self) -> str:
        return self.token


class Name(models.Model):
    """An account text that is the name of a customer from `since` (s since 1970 UTC) on, until the text's next row.

    The first row of a text begins at 0. `until` is where the next row begins; None in the newest row. `version` is the
    configuration's version with which the name was given; 0 if the tally found the text in usage. `counter` stands in
    the names of the text's limits in Redis, so that a customer never continues the counts of another: it is 0 for the
    text's first customer, and the customer's primary key for others.
    """

    identifier = models.CharField(
        _("identifier"), max_length=LONGEST_NAME, blank=True, help_text=_("Empty for anonymous usage.")
    )
    customer = models.ForeignKey(Customer, models.PROTECT, related_name="names", verbose_name=_("customer"))
    since = models.BigIntegerField(_("since (s)"), default=0)
    until = models.BigIntegerField(_("until (s)"), null=True, blank=True)
    counter = models.BigIntegerField(_("number in Redis"), default=0)
    shard = models.SmallIntegerField(_("shard"), db_index=True)
    version = models.BigIntegerField(_("version"), default=0, db_index=True)
    #: The same in all rows of a text. Digests of the text's process totals in manifests include it.
    salt = models.CharField(_("salt"), max_length=2 * SALT_BYTES, default=new_salt, editable=False)

    class Meta:
        verbose_name = _("name of a customer")
        verbose_name_plural = _("names of customers")
        default_permissions = ()
        constraints = [
            models.UniqueConstraint(fields=["identifier", "since"], name="ratelimits_name_of"),
            models.UniqueConstraint(
                fields=["identifier"], condition=models.Q(until=None), name="ratelimits_name_in_force"
            ),
            # Usage is counted in bins of a quarter of an hour, so a bin has one customer.
            models.CheckConstraint(
                condition=models.Q(since__gte=0) & models.Q(since=models.F("since") / BIN_SECONDS * BIN_SECONDS),
                name="ratelimits_name_since",
                violation_error_message=_("A name begins at a full quarter of an hour."),
            ),
        ]

    def __str__(self) -> str:
        return self.identifier or "anonymous"

    def tombstone(self, edit: Edit) -> Tombstone:
        """Return the tombstone with which each process reads the rows about the keys of this text's shard again."""
        key = f"account:{self.identifier}"
        return Tombstone(kind="name", row=self.pk, shard=self.shard, key=key, version=edit.version, since=edit.since)


class Move(models.Model):
    """One move: an account text went from one customer to another. The row says what was moved, by whom, and why.

    Usage of the text from `since` (s since 1970 UTC) on is the new customer's. Usage of before that was on reports
    already stays on them. If adjustments gave it to the new customer, they did so from `adjusted_since` on.
    """

    class Kind(models.TextChoices):
        """What a move is for people."""

        RENAME = "rename", _("rename")
        REUSE = "reuse", _("reuse")
        SWAP = "swap", _("swap")
        MERGE = "merge", _("merge")
        SPLIT = "split", _("split")
        GIVE = "give", _("given to another customer")

    text = models.CharField(_("account"), max_length=LONGEST_NAME, db_index=True)
    kind = models.CharField(_("kind"), max_length=10, choices=Kind.choices)
    former = models.ForeignKey(Customer, models.PROTECT, related_name="+", verbose_name=_("former customer"))
    customer = models.ForeignKey(Customer, models.PROTECT, related_name="+", verbose_name=_("customer"))
    since = models.BigIntegerField(_("since (s)"))
    #: The configuration's version from which on rows about the text are about the new customer; 0 if it had the text.
    version = models.BigIntegerField(_("version"), default=0)
    adjusted_since = models.BigIntegerField(_("adjusted since (s)"), null=True, blank=True)
    counted_again = models.BooleanField(_("counted again"), default=False)
    reason = models.CharField(_("reason"), max_length=200, blank=True)
    by: Any = models.ForeignKey(
        settings.AUTH_USER_MODEL,
        users.set_null,
        null=True,
        related_name="+",
        db_constraint=False,
        verbose_name=_("by"),
    )
    at = UTCDateTimeField(_("at"), auto_now_add=True)

    class Meta:
        verbose_name = _("move of a name")
        verbose_name_plural = _("moves of names")
        ordering = ["-pk"]
        default_permissions = ()

    def __str__(self) -> str:
        return f"{self.text}: {self.former} → {self.customer}"


class DatedName(NamedTuple):
    """The customer, by its primary key, whom an account text names from `since` (s since 1970 UTC) on."""

    since: int
    customer: int


def waiting_text(customer: Customer) -> str:
    """Return the text that the rows about a customer have while no account text names the customer."""
    return f"{WAITING}{customer.token}"


def is_waiting(text: str) -> bool:
    """Return whether a text is of a customer without an account text: it is no name, and no request has it."""
    return _WAITING_TEXT.fullmatch(text) is not None


def waiting_token(text: str) -> str:
    """Return the token of the customer to whom such a text belongs."""
    return text.removeprefix(WAITING)


def _chunks(items: Iterable[str]) -> Iterator[list[str]]:
    unread = iter(items)
    while chunk := list(islice(unread, _CHUNK)):
        yield chunk


def names_of(using: str, texts: Iterable[str]) -> dict[str, list[DatedName]]:
    """Return the customers that each account text names, oldest first. Leave out texts that are no names."""
    found: dict[str, list[DatedName]] = {}
    for chunk in _chunks(sorted(set(texts))):
        rows = Name.objects.using(using).filter(identifier__in=chunk).order_by("since")
        for text, since, customer in rows.values_list("identifier", "since", "customer"):
            found.setdefault(text, []).append(DatedName(since, customer))
    return found


def salts_of(using: str, texts: Iterable[str]) -> dict[str, str]:
    """Return the salt of each account text. Leave out texts that are no names."""
    found: dict[str, str] = {}
    for chunk in _chunks(sorted(set(texts))):
        found |= dict(Name.objects.using(using).filter(identifier__in=chunk).values_list("identifier", "salt"))
    return found


def other_names(using: str, texts: Iterable[str]) -> list[Name]:
    """Return the other names that the customers of these account texts have now."""
    found: list[Name] = []
    for chunk in _chunks(sorted(set(texts))):
        names = Name.objects.using(using).filter(until=None, customer__in=customers_now(using, chunk))
        found += names.exclude(identifier__in=chunk)
    return found


def customers_now(using: str, texts: Collection[str]) -> models.QuerySet[Name, Any]:
    """Return a subquery for the customers that some account texts name now."""
    return Name.objects.using(using).filter(identifier__in=texts, until=None).values("customer")


def customers_of_rows(using: str, texts: Iterable[str]) -> dict[str, int]:
    """Return the customers, by primary key, whom rows with these texts are about now, by text.

    The text of a waiting row means its customer. Leave out texts that are no names.
    """
    found: dict[str, int] = {}
    for chunk in _chunks(sorted(set(texts))):
        names = Name.objects.using(using).filter(identifier__in=chunk, until=None)
        found |= dict(names.values_list("identifier", "customer"))
        if tokens := [waiting_token(text) for text in chunk if is_waiting(text)]:
            waiting = Customer.objects.using(using).filter(token__in=tokens).values_list("token", "pk")
            found |= {f"{WAITING}{token}": pk for token, pk in waiting}
    return found


class NameSpan(NamedTuple):
    """An account text that names a customer from `since` until `until`, in s since 1970 UTC; `until` None: no end."""

    text: str
    since: int
    until: int | None


def customer_at(names: Sequence[DatedName], bin_: int) -> int | None:
    """Return the customer that a text with these names names at a bin; None if nobody."""
    later = bisect_right(names, bin_, key=lambda name: name.since)
    return names[later - 1].customer if later else None


def unsaved_token(text: str) -> str:
    """Return the token that stands in exports for the customer of a text, until the tally makes this customer."""
    return b32encode(hashlib.blake2b(text.encode(), digest_size=10).digest()).decode().lower()


def make_missing(using: str, texts: Iterable[str], version: int = 0) -> None:
    """Make a customer for each account text that never was a name. This is no edit of the configuration.

    Two processes can do this for the same text at the same time: the first one to commit gives the name.
    """
    for chunk in _chunks(sorted(set(texts))):
        known = set(Name.objects.using(using).filter(identifier__in=chunk).values_list("identifier", flat=True))
        new = [text for text in chunk if text not in known]
        if not new:
            continue
        with transaction.atomic(using=using):
            made = Customer.objects.using(using).bulk_create([Customer() for _text in new])
            # The names are sorted: two processes that insert the same names then wait for each other in one order.
            Name.objects.using(using).bulk_create(
                [
                    Name(identifier=text, customer=customer, shard=key_shard(f"account:{text}"), version=version)
                    for text, customer in zip(new, made, strict=True)
                ],
                ignore_conflicts=True,
            )
            # Nobody knows yet the customers whose texts another process has just named.
            nameless = Customer.objects.using(using).filter(pk__in=[customer.pk for customer in made], names=None)
            nameless.delete()
