"""The entry of the status page in the admin's index, with its own permission."""

from __future__ import annotations

from django.utils.translation import gettext_lazy as _

from ratelimits.models.ledger import ShardState


class Status(ShardState):
    """Stands for the status page. It has no table of its own, so the page is listed and permitted like any other."""

    class Meta:
        proxy = True
        verbose_name = _("status")
        verbose_name_plural = _("status")
