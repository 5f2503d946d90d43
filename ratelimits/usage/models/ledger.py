"""The ledger: sealed batches of usage, and the lines of the batches. (The gaps are in gaps.py.)

The drain writes each row of `Batch` and `Line` once, and such a row never changes. Only compaction and archiving remove
batches, always as a whole. Moments in integer columns are by the clock of Redis. Bins and periods are in seconds since
1970 UTC, and all other moments are in microseconds since 1970 UTC.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from django.db import connections, models
from django.db.backends.base.schema import BaseDatabaseSchemaEditor
from django.db.backends.ddl_references import Statement
from django.utils.translation import gettext_lazy as _

from ratelimits.engine.keys import LONGEST_NAME
from ratelimits.moments import moment
from ratelimits.moments.columns import UTCDateTimeField
from ratelimits.salts import SALT_BYTES, new_salt

#: The primary key of a line is its batch's primary key times this number, plus the line's number in the batch (from
#: 0). So the primary key identifies the batch too, and no second index is needed. A batch has at most this number of
#: lines.
LINES_PER_BATCH = 1 << 22

#: Counters of a line, in their order in digests and exports.
COUNTERS = (
    "admitted_requests",
    "admitted_units",
    "denied_requests",
    "denied_units",
    "refunded_requests",
    "refunded_units",
    "shadow_requests",
    "shadow_units",
)
#: Columns that say what a line counts. Digests have them in this order, and lines are sorted in this order.
SUBJECT = ("account", "key", "meter", "rule", "version", "bin")


class ShardState(models.Model):
    """The state of one shard in the ledger: its newest batch and its watermark.

    A drain locks this row. So several drains write the batches of a shard one after another.
    """

    shard = models.PositiveIntegerField(_("shard"), primary_key=True)
    incarnation = models.CharField(_("incarnation"), max_length=64, blank=True)
    seq = models.BigIntegerField(_("newest batch written"), default=0)
    cum = models.BigIntegerField(
        _("running sum"), default=0, help_text=_("Sum of all requests and units so far, modulo 10^15.")
    )
    run = models.CharField(_("run of the server"), max_length=128, blank=True)
    position = models.BigIntegerField(_("batches written"), default=0)
    head = models.CharField(_("head of the digest chain"), max_length=64, blank=True)
    watermark = models.BigIntegerField(
        _("watermark"), default=0, help_text=_("All usage counted before this moment (µs) is in the ledger.")
    )
    #: The server's `first_sealed` (see lua/batch.lua) at the first seal, or after its last loss before the first drain.
    first_sealed = models.BigIntegerField(_("first sealed (µs)"), default=0)
    ahead = models.BigIntegerField(
        _("clock ahead"),
        default=0,
        help_text=_(
            "Microseconds by which the server's clock is ahead of the drain's clock; 0 if it is not ahead. Until"
            " the clocks agree, the watermark does not advance."
        ),
    )
    #: The position up to which `usage/ledger/tally.py` has added batches to the totals.
    tallied = models.BigIntegerField(_("batches tallied"), default=0)
    frozen = models.BooleanField(
        _("frozen"),
        default=False,
        help_text=_("The watermark does not advance until a quarantined batch is resolved."),
    )

    class Meta:
        verbose_name = _("shard")
        verbose_name_plural = _("shards")
        default_permissions = ("view",)

    def __str__(self) -> str:
        return f"{self.shard:02d}"

    @classmethod
    def lock(cls, using: str, shard: int, *, wait: bool = True) -> ShardState | None:
        """Lock the shard's row until the transaction ends, and return the row.

        Return None if there is no row. If `wait` is false, also return None if another transaction has locked the row.
        (On SQLite, always wait for the lock.)
        """
        rows = cls.objects.using(using).filter(shard=shard)
        features = connections[using].features
        if features.has_select_for_update:
            skip = not wait and features.has_select_for_update_skip_locked
            return rows.select_for_update(skip_locked=skip).first()
        # On SQLite, a write as the first statement of the transaction takes the write lock at once. If the transaction
        # began with a read, a later write could fail.
        rows.update(position=models.F("position"))
        return rows.first()

    @classmethod
    def lock_all(cls, using: str, shards: Collection[int]) -> dict[int, ShardState]:
        """Lock the rows of these shards until the transaction ends, in the order of the shards, and return them."""
        rows = cls.objects.using(using).filter(shard__in=shards)
        if connections[using].features.has_select_for_update:
            rows = rows.order_by("shard").select_for_update()
        else:
            rows.update(position=models.F("position"))  # as above
        return {state.shard: state for state in rows}


class Shadow(ShardState):
    """A model without its own table. It gives the shadow page an entry in the admin's index, and a permission."""

    class Meta:
        proxy = True
        verbose_name = _("shadow refusals")
        verbose_name_plural = _("shadow refusals")
        default_permissions = ("view",)


class Batch(models.Model):
    """One sealed batch, or several batches that compaction joined.

    A batch is identified by its shard, its incarnation and its number. It gets all three when it is opened in Redis.
    """

    shard = models.PositiveIntegerField(_("shard"))
    incarnation = models.CharField(_("incarnation"), max_length=64)
    seq = models.BigIntegerField(_("number"))
    position = models.BigIntegerField(
        _("position"), help_text=_("Place in the shard's chain of batches, from 1, without gaps.")
    )
    previous_cum = models.BigIntegerField(
        _("running sum before"), help_text=_("Sum of all requests and units before this batch, modulo 10^15.")
    )
    cum = models.BigIntegerField(
        _("running sum after"), help_text=_("Sum of all requests and units up to the end of this batch, modulo 10^15.")
    )
    previous_requests = models.BigIntegerField(
        _("running sum of requests before"),
        help_text=_("Sum of all requests, without their units, before this batch, modulo 10^15."),
    )
    #: The digest of the content begins with this salt. An erasure gives the batch another one (see erased.py).
    salt = models.CharField(_("salt"), max_length=2 * SALT_BYTES, default=new_salt, editable=False)
    content = models.CharField(_("digest of its content"), max_length=64)
    previous_digest = models.CharField(_("digest before"), max_length=64, blank=True)
    digest = models.CharField(
        _("digest"),
        max_length=64,
        help_text=_("SHA-256 of the previous batch's digest and of this batch's content digest."),
    )
    opened_at = models.BigIntegerField(_("opened at (µs)"))
    sealed_at = models.BigIntegerField(_("sealed at (µs)"))
    run = models.CharField(_("opened under run"), max_length=128)
    sealed_run = models.CharField(_("sealed under run"), max_length=128)
    #: The last batch of the previous incarnation, as "incarnation:number"; "" if no batch came before.
    follows = models.CharField(_("follows"), max_length=100, blank=True)
    fence = models.CharField(
        _("fence"), max_length=40, help_text=_("How the drain made sure that Redis had saved the batch.")
    )
    line_count = models.PositiveIntegerField(_("lines"))
    applied_at = UTCDateTimeField(_("written at"), auto_now_add=True)
    # A compacted batch joins several batches, and has the identity of the last of them. `first_seq` and
    # `first_position` are from the first of them. `parts` has the content digests of all of them, so that the chain can
    # still be verified.
    first_seq = models.BigIntegerField(_("first number"))
    first_position = models.BigIntegerField(_("first position"))
    parts = models.BinaryField(_("digests of its parts"), default=b"", editable=False)
    #: Of a compacted batch: the salts of `parts`. If an erasure replaced names of a batch, compacted or not, there are
    #: only zeros for the digests that were made before.
    part_salts = models.BinaryField(_("salts of its parts"), default=b"", editable=False)
    signature = models.CharField(_("signature"), max_length=64, blank=True)

    class Meta:
        verbose_name = _("batch")
        verbose_name_plural = _("batches")
        default_permissions = ("view",)
        constraints = [
            models.UniqueConstraint(fields=["shard", "incarnation", "seq"], name="ratelimits_batch_identity"),
            models.UniqueConstraint(fields=["shard", "position"], name="ratelimits_batch_position"),
        ]

    def __str__(self) -> str:
        return f"{self.shard:02d}:{self.incarnation}:{self.seq}"

    def contents(self) -> list[str]:
        """Return the content digest of each sealed batch in this row, in hexadecimal."""
        parts = bytes(self.parts)  # Each digest is 32 bytes of SHA-256.
        return [parts[start : start + 32].hex() for start in range(0, len(parts), 32)] or [self.content]

    def salt_of(self, seq: int) -> str:
        """Return the salt of the sealed batch with this number in this row; "" if an erasure deleted the salt."""
        salts = bytes(self.part_salts)
        if not salts:
            return self.salt
        start = SALT_BYTES * (seq - self.first_seq)
        salt = salts[start : start + SALT_BYTES]
        return salt.hex() if any(salt) else ""

    def line_ids(self) -> tuple[int, int]:
        """Return the range of the primary keys of this batch's lines: the first key, and the end (not included)."""
        assert self.pk is not None
        return self.pk * LINES_PER_BATCH, (self.pk + 1) * LINES_PER_BATCH

    def lines(self) -> models.QuerySet[Line]:
        """Return the batch's lines in the order that they have in the digest."""
        first, end = self.line_ids()
        rows = Line.objects.using(self._state.db) if self._state.db else Line.objects.all()
        return rows.filter(pk__gte=first, pk__lt=end).order_by("pk")


class TimeIndex(models.Index):
    """An index of a column whose values are higher in newer rows.

    On PostgreSQL it is a BRIN index, because such an index hardly slows down inserts.
    """

    def create_sql(
        self, model: type[models.Model], schema_editor: BaseDatabaseSchemaEditor, using: str = "", **kwargs: Any
    ) -> Statement:
        brin = schema_editor.connection.vendor == "postgresql"
        statement = super().create_sql(model, schema_editor, using=" USING brin" if brin else using, **kwargs)
        parts: dict[str, Any] = statement.parts
        if brin:
            parts["extra"] = f" WITH (autosummarize=on){parts['extra']}"
        return statement


class Line(models.Model):
    """The usage of one key, meter and rule version in 15 minutes (a bin), from one batch."""

    id = models.BigIntegerField(primary_key=True)
    # This column needs no constraint and no index, because a line is written in one transaction with its batch, and is
    # read by its primary key.
    batch = models.ForeignKey(Batch, models.DO_NOTHING, db_constraint=False, db_index=False, verbose_name=_("batch"))
    account = models.CharField(
        _("account"), max_length=LONGEST_NAME, blank=True, help_text=_("Empty for anonymous usage.")
    )
    key = models.CharField(_("key"), max_length=LONGEST_NAME)
    meter = models.CharField(_("meter"), max_length=LONGEST_NAME)
    rule = models.BigIntegerField(
        _("rule"), help_text=_("The rule that bills this usage, or that refused the requests; 0 if there is none.")
    )
    version = models.BigIntegerField(_("rule version"))
    bin = models.BigIntegerField(
        _("bin (start, in s)"), help_text=_("Start of the 15 minutes in which the usage was counted.")
    )
    admitted_requests = models.BigIntegerField(_("admitted requests"))
    admitted_units = models.BigIntegerField(_("admitted units"))
    denied_requests = models.BigIntegerField(_("denied requests"))
    denied_units = models.BigIntegerField(_("denied units"))
    refunded_requests = models.BigIntegerField(_("refunded requests"))
    refunded_units = models.BigIntegerField(_("refunded units"))
    shadow_requests = models.BigIntegerField(_("shadow-refused requests"))
    shadow_units = models.BigIntegerField(_("shadow-refused units"))
    checksum = models.BigIntegerField(
        _("checksum"), help_text=_("CRC-32 of the line. If a batch was changed, this number shows in which line.")
    )

    class Meta:
        verbose_name = _("ledger line")
        verbose_name_plural = _("ledger lines")
        default_permissions = ("view",)
        indexes = [
            models.Index(fields=["account", "bin"], name="ratelimits_line_account"),
            TimeIndex(fields=["bin"], name="ratelimits_line_time"),
            # The usage of a key in all its accounts (usage/counting/from_ledger.py).
            models.Index(fields=["key", "bin"], name="ratelimits_line_key"),
        ]

    def __str__(self) -> str:
        return f"{self.key} {self.meter} {moment(self.bin * 1_000_000):%Y-%m-%d %H:%M}"


class ChainMark(models.Model):
    """A position in a shard's chain of batches. A report contains the usage of batches up to this position.

    Compaction never joins batches from both sides of such a position, so the report can still be verified.
    """

    shard = models.PositiveIntegerField(_("shard"))
    position = models.BigIntegerField(_("position"))

    class Meta:
        verbose_name = _("end of a report")
        verbose_name_plural = _("ends of reports")
        default_permissions = ()
        constraints = [models.UniqueConstraint(fields=["shard", "position"], name="ratelimits_chain_mark")]

    def __str__(self) -> str:
        return f"{self.shard:02d}:{self.position}"


class _NotRestored(models.Manager["ArchivedRange"]):
    """Leave out ranges that were restored, since their batches are in the ledger again."""

    def get_queryset(self) -> models.QuerySet[ArchivedRange]:
        return super().get_queryset().filter(restored_at=None)


class ArchivedRange(models.Model):
    """Batches of one incarnation that were moved to an archive file.

    When the batches are restored, the row stays. It explains why there are no process totals for the time of these
    batches: archiving deleted the process totals too, and a restore does not bring them back.
    """

    archive = models.CharField(_("archive"), max_length=200)
    shard = models.PositiveIntegerField(_("shard"))
    incarnation = models.CharField(_("incarnation"), max_length=64)
    first_seq = models.BigIntegerField(_("first number"))
    last_seq = models.BigIntegerField(_("last number"))
    first_position = models.BigIntegerField(_("first position"))
    last_position = models.BigIntegerField(_("last position"))
    previous_digest = models.CharField(_("digest before"), max_length=64, blank=True)
    digest = models.CharField(_("digest"), max_length=64)
    file_digest = models.CharField(_("digest of the file"), max_length=64)
    archived_at = UTCDateTimeField(_("archived at"), auto_now_add=True)
    restored_at = UTCDateTimeField(_("restored at"), null=True, blank=True)

    all_ranges: models.Manager[ArchivedRange] = models.Manager()
    objects = _NotRestored()

    class Meta:
        verbose_name = _("archived range")
        verbose_name_plural = _("archived ranges")
        default_permissions = ("view",)
        indexes = [models.Index(fields=["shard", "incarnation"], name="ratelimits_archived")]

    def __str__(self) -> str:
        return f"{self.archive} {self.shard:02d}:{self.first_position}-{self.last_position}"


class QuarantinedBatch(models.Model):
    """A batch that cannot be written to the ledger. Its content is stored until a person decides what to do with it."""

    shard = models.PositiveIntegerField(_("shard"))
    name = models.CharField(_("batch"), max_length=200)
    reason = models.CharField(_("reason"), max_length=300)
    #: The digest of this row in a manifest includes this salt. An erasure gives the row another one (see erased.py).
    salt = models.CharField(_("salt"), max_length=2 * SALT_BYTES, default=new_salt, editable=False)
    content = models.CharField(_("digest of its content"), max_length=64)
    fields: Any = models.JSONField(_("fields"), default=dict)
    arrived_at = UTCDateTimeField(_("arrived at"), auto_now_add=True)
    resolution = models.CharField(_("resolution"), max_length=300, blank=True)
    resolved_at = UTCDateTimeField(_("resolved at"), null=True, blank=True)

    class Meta:
        verbose_name = _("quarantined batch")
        verbose_name_plural = _("quarantined batches")
        default_permissions = ("view",)
        permissions = [("resolve", _("Can accept and discard quarantined batches"))]
        constraints = [models.UniqueConstraint(fields=["shard", "name", "content"], name="ratelimits_quarantined_once")]

    def __str__(self) -> str:
        return f"{self.shard:02d}:{self.name}"
