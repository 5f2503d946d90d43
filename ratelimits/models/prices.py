"""Prices of plans: one price for each meter, in the plan's currency."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

from django.core.exceptions import ValidationError
from django.core.validators import MinValueValidator
from django.db import models
from django.utils.translation import gettext_lazy as _

from ratelimits.engine.keys import LONGEST_NAME
from ratelimits.models.accounts import Plan
from ratelimits.models.history import History
from ratelimits.models.versioned import Versioned
from ratelimits.pricing import tiers
from ratelimits.pricing.money import ZERO, written
from ratelimits.pricing.prices import GRADUATED, PER_UNIT, VOLUME, Price

_NOT_NEGATIVE = [MinValueValidator(ZERO, _("A price cannot be below 0. To give units back, use an adjustment."))]


class PlanPrice(Versioned):
    """The price of a meter's overage under a plan, with the flat fee and the minimum of each billing period."""

    class Pricing(models.TextChoices):
        PER_UNIT = PER_UNIT, _("per unit: every unit has the same price")
        GRADUATED = GRADUATED, _("graduated: each unit has the price of its own tier")
        VOLUME = VOLUME, _("volume: all units have the price of the tier that their total is in")

    plan = models.ForeignKey(Plan, models.CASCADE, related_name="prices", verbose_name=_("plan"))
    meter = models.SlugField(_("meter"), max_length=LONGEST_NAME, default="requests", db_index=False)
    pricing = models.CharField(_("pricing"), max_length=10, choices=Pricing.choices, default=Pricing.PER_UNIT)
    # SQLite stores no more than 15 digits exactly.
    unit_price = models.DecimalField(
        _("unit price"),
        max_digits=tiers.DIGITS,
        decimal_places=tiers.PLACES,
        null=True,
        blank=True,
        validators=_NOT_NEGATIVE,
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
    flat_fee = models.DecimalField(
        _("flat fee"),
        max_digits=15,
        decimal_places=4,
        default=ZERO,
        validators=_NOT_NEGATIVE,
        help_text=_("Charged in each billing period that has a report. The fee does not depend on the usage."),
    )
    minimum = models.DecimalField(
        _("minimum"),
        max_digits=15,
        decimal_places=4,
        default=ZERO,
        validators=_NOT_NEGATIVE,
        help_text=_("The smallest amount for the meter's units and fees in a billing period that has a report."),
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
        price = "; ".join(self.tiers.splitlines()) if self.unit_price is None else written(self.unit_price)
        fees = "".join(
            f", {label} {written(amount)}"
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

    def price(self) -> Price:
        """Return the price in the form with which `ratelimits.pricing` calculates.

        Raise ValueError if the row is invalid. This happens only if it was written without `clean`.
        """
        if self.pricing not in (PER_UNIT, GRADUATED, VOLUME):
            raise ValueError(f"there is no pricing {self.pricing!r}")
        if self.pricing != PER_UNIT:
            price_tiers = tiers.parse(self.tiers)
        elif self.unit_price is None:
            raise ValueError("the price of one unit is missing")
        else:
            price_tiers = (tiers.Tier(None, Decimal(self.unit_price)),)
        if min(price_tiers[0].unit_price, Decimal(self.flat_fee), Decimal(self.minimum)) < 0:
            raise ValueError("a price cannot be below 0")
        return Price(self.pricing, price_tiers, Decimal(self.flat_fee), Decimal(self.minimum))
