"""The table of resets. A row says who deleted the state of a key under a rule, and why."""

from __future__ import annotations

from typing import Any

from django.conf import settings
from django.db import models
from django.utils.translation import gettext_lazy as _

from ratelimits.engine.keys import LONGEST_KEY, LONGEST_NAME
from ratelimits.models import users
from ratelimits.models.keys import validate_counted_key
from ratelimits.moments.columns import UTCDateTimeField


class KeyReset(models.Model):
    """One reset: the limit of a rule for a key began again, as if the key had never been used.

    A reset does not change the usage that was counted before it.
    """

    key = models.CharField(
        _("key"),
        max_length=LONGEST_KEY,
        validators=[validate_counted_key],
        help_text=_("Such as user:42, api_key:4, account:7, ip:203.0.113.9 or header:X-Tenant=acme."),
    )
    account = models.CharField(
        _("account"),
        max_length=LONGEST_NAME,
        blank=True,
        help_text=_(
            "The account of the user or API key. If there is no account, write a hyphen (-). If you leave the field"
            " empty, the app uses the account of the key's latest usage."
        ),
    )
    rule = models.SlugField(_("rule"), max_length=40, help_text=_("Name of the rule."))
    reason = models.CharField(_("reason"), max_length=200)
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
        verbose_name = _("reset")
        verbose_name_plural = _("resets")
        ordering = ["-pk"]
        default_permissions = ("view",)

    def __str__(self) -> str:
        return f"{self.key}: {self.rule}"
