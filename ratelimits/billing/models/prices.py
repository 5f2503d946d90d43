"""Prices of plans: one price for each meter, in the plan's currency."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

from django.core.exceptions import ValidationError
from django.db import models
from django.utils.translation import gettext_lazy as _

from ratelimits import money
from ratelimits.billing.pricing import tiers
from ratelimits.billing.pricing.prices import GRADUATED, PER_UNIT, VOLUME, WITH_REPORT, WITH_USAGE, Price
from ratelimits.engine.keys import LONGEST_NAME
from ratelimits.models.accounts import Plan, PlanPart
from ratelimits.models.fields.prices import PriceField
from ratelimits.models.history import History
from ratelimits.money import ZERO


class PlanPrice(PlanPart):
    """The price of a meter's overage under a plan, with the flat fee and the minimum of each billing period."""

    class Pricing(models.TextChoices):
        PER_UNIT = PER_UNIT, _("per unit: every unit has the same price")
        GRADUATED = GRADUATED, _("graduated: each unit has the price of its own tier")
        VOLUME = VOLUME, _("volume: all units have the price of the tier that their total is in")

    class FeesDue(models.TextChoices):
        WITH_USAGE = WITH_USAGE, _("with usage: if the meter has usage above 0 in the period")
        WITH_REPORT = WITH_REPORT, _("with each report: also without usage, if the account has a report")

    plan = models.ForeignKey(Plan, models.CASCADE, related_name="prices", verbose_name=_("plan"))
    meter = models.SlugField(_("meter"), max_length=LONGEST_NAME, default="requests", db_index=False)
    pricing = models.CharField(_("pricing"), max_length=10, choices=Pricing.choices, default=Pricing.PER_UNIT)
    unit_price = PriceField(
        _("unit price"),
        null=True,
        blank=True,
        help_text=_("Price of one unit beyond the included quantity. Leave it empty if there are tiers."),
    )
    tiers = models.TextField(
        _("tiers"),
        blank=True,
        help_text=_(
            "One tier per line, for the units beyond the included quantity: “1000: 0.10” for the first thousand,"
            " “more: 0.05” for the rest. In “1000: 0.10 + 5”, 5 is a fee that is due if at least one unit is in the"
            " tier."
        ),
    )
    flat_fee = PriceField(
        _("flat fee"), default=ZERO, help_text=_("Charged once in each billing period, as “fees are due” says.")
    )
    minimum = PriceField(
        _("minimum"),
        default=ZERO,
        help_text=_("The smallest amount for the meter's units and fees in a billing period, as “fees are due” says."),
    )
    fees_due = models.CharField(
        _("fees are due"),
        max_length=10,
        choices=FeesDue.choices,
        default=FeesDue.WITH_USAGE,
        help_text=_(
            "When the flat fee and the minimum are due. Usage is what the account used, minus refunds, plus or minus"
            " adjustments. Refused requests and requests that were given back are no usage."
        ),
    )

    history = History()

    class Meta:
        verbose_name = _("price")
        verbose_name_plural = _("prices")
        ordering = ["plan", "meter"]
        constraints = [
            models.UniqueConstraint(
                fields=["plan", "meter"],
                name="ratelimits_price_per_meter",
                violation_error_message=_("This plan already has a price of this meter: change the existing price."),
            )
        ]

    def __str__(self) -> str:
        price = "; ".join(self.tiers.splitlines()) if self.unit_price is None else price_text(self.unit_price)
        fees = "".join(
            f", {label} {price_text(amount)}"
            for label, amount in (("flat fee", self.flat_fee), ("minimum", self.minimum))
            if amount
        )
        return f"{self.meter} {self.pricing}: {price}{fees}"

    def clean(self) -> None:
        """Write the tiers in their usual form.

        Raise ValidationError if a price is wrong or the plan has no currency.
        """
        errors: dict[str, Any] = {}
        if self.pricing == PER_UNIT:
            if self.unit_price is None:
                errors["unit_price"] = _("Write the price of one unit, such as 0.10, or 0 if units are free.")
            if self.tiers.strip():
                errors["tiers"] = _("A price per unit has no tiers: choose graduated or volume, or leave this empty.")
        else:
            if self.unit_price is not None:
                errors["unit_price"] = _(
                    "Leave this empty, because the tiers contain the prices. Or choose “per unit” as pricing."
                )
            try:
                self.tiers = tiers.to_text(tiers.parse(self.tiers))
            except ValueError as error:
                errors["tiers"] = str(error)
        plan = getattr(self, "plan", None)  # None if the form could not read the plan.
        if plan is not None and not plan.currency:
            errors.setdefault("meter", _("The plan has no currency: set one on the plan, such as EUR."))
        if errors:
            raise ValidationError(errors)

    @classmethod
    def check_plan(cls, plan: Plan) -> None:
        """Raise ValidationError if the plan has prices but no currency."""
        if not plan.currency and plan.prices.exists():
            raise ValidationError(
                {"currency": _("The plan has prices, and prices need a currency: delete the prices first.")}
            )

    def price(self) -> Price:
        """Return the price in the form with which `ratelimits.billing.pricing` calculates.

        Raise ValueError if the row is invalid. This happens only if it was written without `clean`.
        """
        if self.pricing not in (PER_UNIT, GRADUATED, VOLUME):
            raise ValueError(f"there is no pricing {self.pricing!r}")
        if self.pricing != PER_UNIT:
            price_tiers = tiers.parse(self.tiers)
        elif self.unit_price is None:
            raise ValueError("the price of one unit is missing")
        else:
            price_tiers = (tiers.Tier(None, price_of(self.unit_price)),)
        if self.fees_due not in (WITH_USAGE, WITH_REPORT):
            raise ValueError(f"fees cannot be due {self.fees_due!r}")
        return Price(self.pricing, price_tiers, price_of(self.flat_fee), price_of(self.minimum), self.fees_due)


def price_of(value: Any) -> Decimal:
    """Return the price in a column. Raise ValueError if it is none; only raw SQL writes such a value."""
    return money.read(value) if isinstance(value, str) else money.price(Decimal(value))


def price_text(value: Any) -> str:
    """Return the price in a column as text, also if it is none."""
    return value if isinstance(value, str) else money.written(Decimal(value))
