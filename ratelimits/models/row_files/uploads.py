"""CSV files that were uploaded in the admin. A file is stored until a person confirms the changes that it makes."""

from __future__ import annotations

import zlib
from datetime import timedelta
from typing import Any

from django.db import models
from django.utils.translation import gettext_lazy as _

from ratelimits import moments
from ratelimits.moments.columns import UTCDateTimeField

#: How long a file is stored while nobody confirms its changes.
MAX_AGE = timedelta(days=1)


class Upload(models.Model):
    """A compressed CSV file for one table. It is in the database, so that every web server can show and import it."""

    table = models.CharField(_("table"), max_length=40)
    #: The primary key of the user, as a text: the user can be in another database.
    by = models.CharField(_("by"), max_length=255)
    content = models.BinaryField(_("content"))
    at = UTCDateTimeField(_("at"), auto_now_add=True, db_index=True)

    class Meta:
        verbose_name = _("uploaded file")
        verbose_name_plural = _("uploaded files")
        default_permissions = ()

    def __str__(self) -> str:
        return f"{self.table} {self.pk}"

    @classmethod
    def keep(cls, table: str, by: Any, raw: bytes, using: str) -> Upload:
        """Store a file. Delete the user's earlier file for this table, and all files that are too old."""
        rows = cls.objects.using(using)
        rows.filter(at__lt=moments.now() - MAX_AGE).delete()
        rows.filter(table=table, by=str(by)).delete()
        return rows.create(table=table, by=str(by), content=zlib.compress(raw, 1))

    @classmethod
    def find(cls, pk: int, table: str, by: Any, using: str) -> Upload | None:
        """Return a file that this user uploaded. Return None if it was imported or replaced, or is too old."""
        rows = cls.objects.using(using).filter(pk=pk, table=table, by=str(by))
        return rows.filter(at__gte=moments.now() - MAX_AGE).first()

    def raw(self) -> bytes:
        """Return the bytes of the file."""
        return zlib.decompress(self.content)
