"""The entries of the status page and of the inspector in the admin's index, each with its own permission."""

from __future__ import annotations

from django.utils.translation import gettext_lazy as _

from ratelimits.models.ledger import ShardState


class Status(ShardState):
    """A model without a table of its own. It makes Django list the status page, with a permission, like other pages."""

    class Meta:
        proxy = True
        verbose_name = _("status")
        verbose_name_plural = _("status")


class Inspect(ShardState):
    """Stands for the inspector, likewise."""

    class Meta:
        proxy = True
        verbose_name = _("inspector")
        verbose_name_plural = _("inspector")
