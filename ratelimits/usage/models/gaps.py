"""Models that show whether usage may be missing from the ledger: declared gaps, and the totals of processes.

Moments are in microseconds since 1970 UTC, and bins in seconds since 1970 UTC, by the clock of Redis.
"""

from __future__ import annotations

from django.db import models
from django.utils.translation import gettext_lazy as _

from ratelimits.engine.keys import LONGEST_NAME
from ratelimits.moments import moment
from ratelimits.moments.columns import UTCDateTimeField
from ratelimits.salts import SALT_BYTES, new_salt

#: The names of the fence that are fsync policies of the server (`DurabilityGap.fsync`, `Batch.fence`). The app has read
#: them from the server and has waited for its disk. All other names are weaker promises.
FSYNC_POLICIES = ("always", "everysec")


class GapKind(models.TextChoices):
    """The reason why usage may be missing."""

    RESTART = "restart", _("the server restarted or was replaced")
    INCARNATION = "incarnation", _("counting began anew")
    MISSING = "missing", _("batches are missing")
    ROLLBACK = "rollback", _("the server's data went back to an older state")
    WIPE = "wipe", _("the server's data was wiped")
    SUM = "sum", _("the sums of two batches do not fit together")
    FORK = "fork", _("a batch was read again with less usage")
    UNKNOWN = "unknown", _("replies were lost")
    UNMETERED = "unmetered", _("requests were admitted unmetered")
    UNREPORTED = "unreported", _("a process ended before it counted all requests")
    UNCOUNTED = "uncounted", _("refused requests were not counted as denied")
    FORCED = "forced", _("a period was closed before its usage was complete")
    CLOCK = "clock", _("the server's clock was ahead")
    FENCE = "fence", _("how Redis kept usage until it was billed")


class DurabilityGap(models.Model):
    """A declaration that usage between two moments may be missing from the ledger."""

    #: Text that identifies the event which caused the gap. The same event always gives the same text, so no gap is
    #: declared twice.
    event = models.CharField(_("event"), max_length=300, unique=True)
    kind = models.CharField(_("kind"), max_length=16, choices=GapKind.choices)
    shard = models.PositiveIntegerField(_("shard"), null=True, blank=True, help_text=_("Empty for several shards."))
    #: The shards of one server of a cluster, as ",3,17,"; "" if `shard` names one shard, or if all are meant.
    shards = models.TextField(_("shards"), blank=True, editable=False)
    account = models.CharField(
        _("account"), max_length=LONGEST_NAME, blank=True, help_text=_("Empty for all accounts of the shard.")
    )
    incarnation = models.CharField(_("incarnation"), max_length=64, blank=True)
    first_seq = models.BigIntegerField(_("first batch"), null=True, blank=True)
    last_seq = models.BigIntegerField(_("last batch"), null=True, blank=True)
    since = models.BigIntegerField(_("since (µs)"))
    until = models.BigIntegerField(_("until (µs)"))
    fsync = models.CharField(_("fsync policy"), max_length=40, blank=True)
    units = models.BigIntegerField(_("units known to be missing"), null=True, blank=True)
    #: Only for missing batches. They counted this number of requests, admitted or not, with `units` units together.
    requests = models.BigIntegerField(_("requests known to be missing"), null=True, blank=True)
    detail = models.TextField(_("detail"), blank=True)
    #: The server that restarted: its product, and when it last answered before, in µs.
    server = models.CharField(_("server"), max_length=16, blank=True)
    answered = models.BigIntegerField(_("answered until (µs)"), null=True, blank=True)
    #: Whether it is certain that nothing is missing. Then no report prints the gap: it is a note.
    harmless = models.BooleanField(_("nothing is missing"), default=False)
    acknowledged_at = UTCDateTimeField(_("acknowledged at"), null=True, blank=True)
    acknowledged_by = models.CharField(_("acknowledged by"), max_length=150, blank=True)
    reason = models.CharField(_("reason"), max_length=200, blank=True)
    declared_at = UTCDateTimeField(_("declared at"), auto_now_add=True)
    recovered_at = UTCDateTimeField(_("recovered at"), null=True, blank=True)
    #: The digest of this row in a manifest includes this salt. An erasure gives the row another one (see erased.py).
    salt = models.CharField(_("salt"), max_length=2 * SALT_BYTES, default=new_salt, editable=False)

    class Meta:
        verbose_name = _("durability gap")
        verbose_name_plural = _("durability gaps")
        default_permissions = ("view",)
        permissions = [("acknowledge", _("Can acknowledge durability gaps"))]
        indexes = [models.Index(fields=["shard", "until"], name="ratelimits_gap_shard")]

    def __str__(self) -> str:
        return (
            self.restarted()
            or f"{self.get_kind_display()}: {moment(self.since):%Y-%m-%d %H:%M:%S} – {moment(self.until):%H:%M:%S} UTC"
        )

    def restarted(self) -> str:
        """Return a sentence such as "Valkey restarted 10:28:02–10:28:09 UTC on 2026-11-01"; "" for other gaps.

        The first time is when the server last answered, and the second when it had started again.
        """
        if not self.server or self.answered is None:
            return ""
        since, until = moment(self.answered), moment(self.until)
        if since.date() != until.date():
            words = _("%(server)s restarted between %(since)s and %(until)s UTC")
            return words % {
                "server": self.server,
                "since": f"{since:%Y-%m-%d %H:%M:%S}",
                "until": f"{until:%Y-%m-%d %H:%M:%S}",
            }
        words = _("%(server)s restarted %(since)s–%(until)s UTC on %(day)s")
        return words % {
            "server": self.server,
            "since": f"{since:%H:%M:%S}",
            "until": f"{until:%H:%M:%S}",
            "day": f"{until:%Y-%m-%d}",
        }


def of_shard(shard: int) -> models.Q:
    """Return the condition that a gap is about this shard, alone or with others."""
    all_shards = models.Q(shard=None, shards="")
    return models.Q(shard=shard) | all_shards | models.Q(shards__contains=f",{shard},")


class GapChange(models.Model):
    """A mark that a gap was declared or changed. Final reports must still be compared with the gap."""

    gap = models.ForeignKey(
        DurabilityGap, models.CASCADE, related_name="+", db_constraint=False, verbose_name=_("durability gap")
    )

    class Meta:
        verbose_name = _("change of a durability gap")
        verbose_name_plural = _("changes of durability gaps")
        default_permissions = ()

    def __str__(self) -> str:
        return str(self.gap)


class ProcessTotal(models.Model):
    """A total of requests and units that one process counted by itself. Each write replaces an older total.

    If `process` is empty, the row has the sum over all processes.
    """

    process = models.CharField(_("process"), max_length=64)
    #: What happened to the requests: "admitted", "blocked", "exempt", "unreadable", "unmetered", "unanswered",
    #: "unreported", "uncounted" or "undecided".
    kind = models.CharField(_("kind"), max_length=16)
    account = models.CharField(_("account"), max_length=LONGEST_NAME, blank=True)
    key = models.CharField(_("key"), max_length=LONGEST_NAME)
    meter = models.CharField(_("meter"), max_length=LONGEST_NAME)
    bin = models.BigIntegerField(_("bin (start, in s)"))
    requests = models.BigIntegerField(_("requests"))
    units = models.BigIntegerField(_("units"))

    class Meta:
        verbose_name = _("total of a process")
        verbose_name_plural = _("totals of processes")
        default_permissions = ()
        constraints = [
            models.UniqueConstraint(
                fields=["account", "bin", "kind", "key", "meter", "process"], name="ratelimits_process_total"
            )
        ]
        indexes = [models.Index(fields=["kind", "bin"], name="ratelimits_process_total_bin")]

    def __str__(self) -> str:
        return f"{self.process} {self.kind} {self.key}"
