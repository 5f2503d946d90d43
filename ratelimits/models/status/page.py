"""The entries of the status page, the shadow page and the inspector in the admin's index, each with a permission."""

from __future__ import annotations

from django.utils.translation import gettext_lazy as _

from ratelimits.models.ledger import ShardState


class Status(ShardState):
    """A model without its own table. It gives the status page an entry in the admin's index, and a permission."""

    class Meta:
        proxy = True
        verbose_name = _("status")
        verbose_name_plural = _("status")
        default_permissions = ("view",)


class Inspect(ShardState):
    """A model without its own table. It gives the inspector an entry in the admin's index, and a permission."""

    class Meta:
        proxy = True
        verbose_name = _("inspector")
        verbose_name_plural = _("inspector")
        default_permissions = ("view",)


class Shadow(ShardState):
    """A model without its own table. It gives the shadow page an entry in the admin's index, and a permission."""

    class Meta:
        proxy = True
        verbose_name = _("shadow refusals")
        verbose_name_plural = _("shadow refusals")
        default_permissions = ("view",)
