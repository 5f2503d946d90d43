"""Accounts, plans, the quantities that plans include, and plan memberships, which say the plan of a key."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from django.core.exceptions import ValidationError
from django.db import models, router
from django.dispatch import receiver
from django.utils.translation import gettext_lazy as _

from ratelimits.algorithms import calendar
from ratelimits.algorithms.billing_periods import check_terms
from ratelimits.engine.keys import LONGEST_KEY, LONGEST_NAME
from ratelimits.models.customers import (
    Customer,
    Name,
    customers_of_rows,
    is_waiting,
    make_missing,
    other_names,
)
from ratelimits.models.fields.validity import END_NOT_AFTER_START, overlapping, validate_period
from ratelimits.models.history import History
from ratelimits.models.keys import canonical_key, derived_key, refuse_secret, validate_account, validate_key
from ratelimits.models.versioned import Versioned, versioned_models
from ratelimits.models.versions import Edit, Tombstone, edited
from ratelimits.moments.columns import UTCDateTimeField
from ratelimits.money import minor_digits


def validate_timezone(name: str) -> None:
    """Raise ValidationError if the text is not an IANA time zone."""
    try:
        calendar.zone(name)
    except ValueError as error:
        raise ValidationError(str(error), code="timezone") from error


def validate_currency(code: str) -> None:
    """Raise ValidationError if the text is not a currency code of ISO 4217."""
    try:
        minor_digits(code)
    except ValueError as error:
        raise ValidationError(str(error), code="currency") from error


class Plan(Versioned):
    """A named set of rules, included quantities and prices. Keys and accounts can be on a plan."""

    name = models.CharField(_("name"), max_length=80)
    slug = models.SlugField(
        _("slug"), max_length=40, unique=True, help_text=_("Name of the plan in reports and in code.")
    )
    currency = models.CharField(
        _("currency"),
        max_length=3,
        blank=True,
        validators=[validate_currency],
        help_text=_("Currency of the plan's prices, such as EUR. Leave the field empty if the plan has no prices."),
    )

    history = History()

    class Meta:
        verbose_name = _("plan")
        verbose_name_plural = _("plans")
        ordering = ["name"]

    def __str__(self) -> str:
        return self.name

    def clean(self) -> None:
        """Raise ValidationError if rows of the plan do not allow its values."""
        if not self._state.adding:
            for part in plan_parts():
                part.check_plan(self)


def plan_name(row: Any) -> str:
    """Return the name of a row's plan. A row of the history can name a deleted plan: then return its id, as in "#7"."""
    try:
        return str(row.plan)
    except Plan.DoesNotExist:
        return f"#{row.plan_id}"


class PlanPart(Versioned):
    """Base class of the tables with what a plan consists of, besides its rules: a row for each plan and meter.

    People edit the rows on the page of their plan: they have no page of their own. A higher floor adds a part to plans
    with a table of its own app.
    """

    plan: Any
    meter: Any

    class Meta:
        abstract = True

    @classmethod
    def check_plan(cls, plan: Plan) -> None:
        """Raise ValidationError if the rows of this plan do not allow its values."""


def plan_parts() -> list[Any]:
    """Return the models of the installed apps that are a `PlanPart`."""
    return [model for model in versioned_models() if issubclass(model, PlanPart)]


def meters_of_plans(using: str, **chosen: Any) -> frozenset[str]:
    """Return the meters that rows of plans name, or rows that the filters `chosen` find."""
    first, *others = (
        part._default_manager.using(using).filter(**chosen).order_by().values_list("meter", flat=True)
        for part in plan_parts()
    )
    return frozenset(first.union(*others).order_by())  # the union would have the order of the first table


class PlanInclusion(PlanPart):
    """The units of a meter that a plan includes in each billing period. Further units are overage."""

    plan = models.ForeignKey(Plan, models.CASCADE, related_name="inclusions", verbose_name=_("plan"))
    meter = models.SlugField(_("meter"), max_length=LONGEST_NAME, default="requests", db_index=False)
    quantity = models.PositiveBigIntegerField(
        _("quantity"), help_text=_("Units of the meter that are included in each billing period.")
    )

    history = History()

    class Meta:
        verbose_name = _("included quantity")
        verbose_name_plural = _("included quantities")
        ordering = ["plan", "meter"]
        constraints = [
            models.UniqueConstraint(
                fields=["plan", "meter"],
                name="ratelimits_inclusion_per_meter",
                violation_error_message=_(
                    "This plan already includes a quantity of this meter: change the existing quantity."
                ),
            )
        ]

    def __str__(self) -> str:
        return f"{self.quantity:,} {self.meter}"


class IdentifierEditedError(ValueError):
    """Raised if code edits the identifier of an account: its customer would lose the row without a word."""

    def __init__(self, stored: str) -> None:
        text = _(
            "The identifier of an account cannot be edited. To rename %(text)s, or to give it to another customer, move"
            " the name: on the page of the account, or with the command ratelimits_move, which are in ratelimits.usage."
        )
        super().__init__(text % {"text": stored})


class SecondAccountError(ValueError):
    """Raised if code adds an account for a text whose customer has an account under another text."""

    def __init__(self, text: str, account: str) -> None:
        said = _(
            "%(text)s is a text of a customer who has the account %(account)s already, and its plan and terms hold for"
            " all texts of the customer: edit that account. If %(text)s is somebody else, move it first."
        )
        super().__init__(said % {"text": text, "account": account})


def identifier_references() -> list[models.ForeignKey[Any, Any]]:
    """Return the foreign keys of other models that refer to accounts by the identifier, in place of the primary key.

    The database refuses to change the identifier of an account to which such a key refers.
    """
    relations: Iterable[Any] = Account._meta.get_fields(include_hidden=True)
    keys: Iterable[Any] = (one.field for one in relations if isinstance(one, models.ManyToOneRel))
    return [key for key in keys if key.db_constraint and key.target_field is Account._meta.get_field("identifier")]


class ReferredError(ValueError):
    """Raised if the identifier of an account would change, but rows of the project refer to the account by it."""

    def __init__(self, key: models.ForeignKey[Any, Any], text: str) -> None:
        said = _(
            "%(field)s of a row of your project refers to the account %(text)s by its identifier, which would change."
            " Let this foreign key refer to the primary key of accounts (without to_field): it then stays with the"
            " customer. Or store the text without a foreign key: it then means whoever has the text."
        )
        super().__init__(said % {"field": f"{key.model._meta.label}.{key.name}", "text": text})


def refuse_references(using: str, identifiers: Collection[str]) -> None:
    """Raise ReferredError if a row of the project refers to one of these accounts by its identifier."""
    for key in identifier_references():
        if router.allow_migrate_model(using, key.model):
            rows = key.model._base_manager.using(using).filter(**{f"{key.attname}__in": identifiers})
            if (text := rows.values_list(key.attname, flat=True).first()) is not None:
                raise ReferredError(key, text)


def _customers(rows: Sequence[Any], using: str) -> list[Mapping[str, Any]]:
    """Return the customer of each row, for the history. Raw SQL can write a row for a text without a customer."""
    texts = {row.identifier for row in rows}
    customers = customers_of_rows(using, texts)
    if missing := {text for text in texts - customers.keys() if not is_waiting(text)}:
        make_missing(using, missing)
        customers |= customers_of_rows(using, missing)
    return [{"customer_id": customers.get(row.identifier)} for row in rows]


class Account(Versioned):
    """A customer who pays for the usage of keys. The row says the customer's time zone, billing anchor and plan.

    A row is about one customer for ever. A customer has at most one row, and its plan and terms hold for all texts of
    the customer. The identifier is one of these texts. If a move takes this text away, the row gets another text of the
    customer; without one, it waits under the customer's token.
    """

    identifier = models.CharField(
        _("identifier"),
        max_length=LONGEST_NAME,
        unique=True,
        validators=[validate_account],
        help_text=_(
            "The value that RATELIMITS['ACCOUNT'] returns for the account's requests; by default the user's primary"
            " key."
        ),
    )
    name = models.CharField(_("name"), max_length=120, blank=True)
    timezone = models.CharField(
        _("time zone"),
        max_length=64,
        default="UTC",
        validators=[validate_timezone],
        help_text=_("Time zone of the account's billing periods."),
    )
    billing_anchor = models.CharField(
        _("billing anchor"),
        max_length=32,
        blank=True,
        help_text=_(
            "A local date and time at which a billing month starts, such as 2026-01-31T06:00, at a quarter of an hour."
            " Leave it empty for calendar months."
        ),
    )
    plan = models.ForeignKey(
        Plan, models.PROTECT, null=True, blank=True, related_name="accounts", verbose_name=_("plan")
    )
    next_plan = models.ForeignKey(
        Plan,
        models.PROTECT,
        null=True,
        blank=True,
        related_name="+",
        verbose_name=_("next plan"),
        help_text=_("The plan from the next billing period on: the present period keeps its plan."),
    )
    #: The moment at which `next_plan` becomes the plan: the end of the billing period in which it was chosen. Empty
    #: until `plan_changes.schedule` or the next drain has found this moment.
    next_plan_at = UTCDateTimeField(_("next plan from"), null=True, blank=True, editable=False)
    shard = models.SmallIntegerField(_("shard"), editable=False, db_index=True, default=0)

    # Each record says whose plan and terms it has: the customer whom the row's text named when the record was written.
    # So the past of a customer does not depend on who has had which text.
    history = History(
        {"customer": models.ForeignKey(Customer, models.DO_NOTHING, null=True, related_name="+", db_constraint=False)},
        _customers,
    )

    # An edit that changes the identifier writes a tombstone. Each save calculates the shard from the identifier, and
    # writes the identifier as the account's requests have it.
    tombstone_fields = ("identifier",)
    derived_fields = ("shard", "identifier")

    class Meta:
        verbose_name = _("account")
        verbose_name_plural = _("accounts")
        ordering = ["identifier"]

    def __str__(self) -> str:
        return self.name or self.identifier

    def full_clean(self, *args: Any, **kwargs: Any) -> None:
        """Raise ValidationError if a value is not valid, or if the identifier was changed: it can only be moved.

        Also if the row would be the customer's second one.
        """
        if not self._state.adding:
            stored = Account.objects.filter(pk=self.pk).values_list("identifier", flat=True).first()
            if stored not in (None, Account.derive({"identifier": self.identifier})["identifier"]):
                raise ValidationError(str(IdentifierEditedError(stored)), code="identifier")
        super().full_clean(*args, **kwargs)
        if self._state.adding:
            (text,) = _texts([self])
            if (account := other_accounts(Account.objects.db, [text]).get(text)) is not None:
                raise ValidationError(str(SecondAccountError(text, account)), code="second")

    def clean(self) -> None:
        """Raise ValidationError if the billing anchor or the next plan is not valid."""
        if self.next_plan_id is None:
            self.next_plan_at = None
        elif self.next_plan_id == self.plan_id:
            raise ValidationError({"next_plan": _("The account is already on this plan: leave the field empty.")})
        if not calendar.exists(self.timezone):
            return  # `validate_timezone` reports it.
        try:
            check_terms(self.timezone, self.billing_anchor, time.time_ns() // 1000)
        except ValueError as error:
            field = "billing_anchor" if self.billing_anchor else "timezone"
            raise ValidationError({field: str(error)}) from error

    @property
    def key(self) -> str:
        """Return the account's key string, such as "account:7"."""
        return f"account:{self.identifier}"

    @classmethod
    def derive(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        return derived_key(values, "identifier", "account:")

    def tombstone(self, edit: Edit) -> Tombstone:
        """Return the tombstone that records the deletion of this row, or the change of its key."""
        tombstone = super().tombstone(edit)
        tombstone.key, tombstone.shard = self.key, self.shard
        return tombstone


def _texts(rows: Iterable[Account]) -> set[str]:
    """Return the texts of accounts as requests have them. A row can have its text as it was typed."""
    return {Account.derive({"identifier": row.identifier})["identifier"] for row in rows}


def other_accounts(using: str, texts: Collection[str]) -> dict[str, str]:
    """Return the account that the customer of each text has under another text. Leave out texts without one."""
    customers = customers_of_rows(using, texts)
    counts = Counter(customers.values())
    owners = {text: customer for text, customer in customers.items() if counts[customer] > 1}
    owners |= {name.identifier: name.customer_id for name in other_names(using, texts)}
    rows = Account.objects.using(using).filter(identifier__in=owners).order_by("-pk") if owners else ()
    accounts = {owners[row.identifier]: row.identifier for row in rows}
    return {text: accounts[pk] for text, pk in customers.items() if accounts.get(pk, text) != text}


@receiver(edited, sender=Account, dispatch_uid="ratelimits.make_customers")
def _make_customers(
    sender: Any, before: Collection[Account], after: Collection[Account], edit: Edit, **kwargs: Any
) -> None:
    """Make a customer for each account that an edit writes under a new identifier. Refuse a customer's second row."""
    make_missing(edit.using, {text for text in _texts(after) if not is_waiting(text)}, edit.version)
    known = {row.pk for row in before}
    for text, account in other_accounts(edit.using, _texts(row for row in after if row.pk not in known)).items():
        raise SecondAccountError(text, account)


@receiver(edited, sender=Account, dispatch_uid="ratelimits.forget_other_names")
def _forget_other_names(
    sender: Any, before: Collection[Account], after: Collection[Account], edit: Edit, **kwargs: Any
) -> None:
    """Let processes read the keys of customers with several names again: the row of an account applies to all names."""
    texts = _texts((*before, *after))
    others = other_names(edit.using, texts)
    if others:
        own = Name.objects.using(edit.using).filter(identifier__in=texts, until=None)
        own = own.filter(customer__in={name.customer_id for name in others})
        Tombstone.objects.using(edit.using).bulk_create(name.tombstone(edit) for name in (*own, *others))


class PlanMembership(Versioned):
    """The plan of a key for some time. A key can have several plans, one after another."""

    key = models.CharField(
        _("key"),
        max_length=LONGEST_KEY,
        validators=[validate_key],
        help_text=_("A key such as api_key:4, user:42 or header:X-Tenant=acme."),
    )
    plan = models.ForeignKey(Plan, models.PROTECT, related_name="memberships", verbose_name=_("plan"))
    valid_from = UTCDateTimeField(_("valid from"), null=True, blank=True)
    valid_until = UTCDateTimeField(_("valid until"), null=True, blank=True)
    shard = models.SmallIntegerField(_("shard"), editable=False, db_index=True, default=0)

    history = History()

    # An edit that changes the key writes a tombstone. Each save calculates the shard from the key, and writes the key
    # in its canonical form.
    tombstone_fields = ("key",)
    derived_fields = ("shard", "key")

    class Meta:
        verbose_name = _("plan membership")
        verbose_name_plural = _("plan memberships")
        ordering = ["key", "valid_from"]
        indexes = [models.Index(fields=["key"], name="ratelimits_membership_of")]
        constraints = [
            # `clean` refuses any two rows that overlap, but rows can be written without `clean`. This constraint
            # refuses two rows without an end, because both would be in force after the later of their starts.
            models.UniqueConstraint(
                fields=["key"],
                condition=models.Q(valid_until=None),
                name="ratelimits_membership_open_ended",
                violation_error_message=_(
                    "This key already has a plan membership without an end: change or end that membership first."
                ),
            ),
            models.CheckConstraint(
                condition=models.Q(valid_from=None)
                | models.Q(valid_until=None)
                | models.Q(valid_until__gt=models.F("valid_from")),
                name="ratelimits_membership_period",
                violation_error_message=END_NOT_AFTER_START,
            ),
        ]

    def __str__(self) -> str:
        return f"{self.key}: {plan_name(self)}"

    def clean_values(self) -> None:
        """Raise ValidationError if the values of the row are not valid. Do not look at other memberships."""
        if self.key.startswith("account:"):
            raise ValidationError(
                {"key": _("A membership cannot be for an account: choose the plan on the page of the account.")}
            )
        refuse_secret(self.key)
        validate_period(self.valid_from, self.valid_until)

    def clean(self) -> None:
        self.key = canonical_key(self.key)
        self.clean_values()
        other = overlapping(self, PlanMembership.objects.filter(key=self.key).select_related("plan"))
        if other is not None:
            message = _("At the same time this key is on the plan %(plan)s: change or end that membership first.")
            raise ValidationError({"key": message % {"plan": other.plan}})

    @classmethod
    def derive(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        return derived_key(values)

    def tombstone(self, edit: Edit) -> Tombstone:
        """Return the tombstone that records the deletion of this row, or the change of its key."""
        tombstone = super().tombstone(edit)
        tombstone.key, tombstone.shard, tombstone.plan = self.key, self.shard, self.plan_id
        return tombstone
