"""Recorded requests, on which a rule can be tried before it is saved."""

from __future__ import annotations

from django.db import models
from django.utils.translation import gettext_lazy as _

from ratelimits.engine.keys import LONGEST_KEY, LONGEST_NAME
from ratelimits.moments import moment


class RecordedRequest(models.Model):
    """One recorded request.

    `api_key` is the key that rules count, such as "api_key:4", and never the secret. `costs` has the cost in each
    meter. `left_out` is the number of earlier requests that could not be recorded. Only the first row of each write has
    this number.
    """

    at = models.BigIntegerField(_("time (µs)"))
    user = models.CharField(_("user"), max_length=LONGEST_KEY, blank=True)
    api_key = models.CharField(_("API key"), max_length=LONGEST_KEY, blank=True)
    account = models.CharField(_("account"), max_length=LONGEST_KEY, blank=True)
    address = models.CharField(_("address"), max_length=LONGEST_KEY, blank=True)
    scope = models.CharField(_("scope"), max_length=LONGEST_NAME)
    method = models.CharField(_("method"), max_length=20, blank=True)
    costs = models.JSONField(_("costs"))
    refused = models.BooleanField(_("refused"), default=False)
    left_out = models.PositiveIntegerField(_("requests before this one that were not recorded"), default=0)

    class Meta:
        verbose_name = _("recorded request")
        verbose_name_plural = _("recorded requests")
        default_permissions = ()
        indexes = [models.Index(fields=["at"], name="ratelimits_recorded_at")]

    def __str__(self) -> str:
        key = self.api_key or self.user or self.address or self.account
        return f"{key} {self.scope} {moment(self.at):%Y-%m-%d %H:%M:%S}"
