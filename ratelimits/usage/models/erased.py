"""Digests of rows in which an erasure replaced names: the digest that was, and the digest that is now.

Batches, reports and manifests have digests of rows with the names of customers. An erasure replaces these names by
pseudonyms, and the salts of the digests by other salts. So the rows have other digests then. A row of `ErasedDigest`
says that a digest stands for an earlier one. Verification checks the signatures of these rows, so nobody can add such
a row without SIGNING_KEY.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import islice

from django.db import models
from django.utils.translation import gettext_lazy as _

from ratelimits.usage import signatures

#: Maximum number of digests in one query.
_CHUNK = 500


class ErasedDigest(models.Model):
    """What had the digest `before` has the digest `after` since an erasure replaced names in it."""

    before = models.CharField(_("digest before"), max_length=64, db_index=True)
    after = models.CharField(_("digest after"), max_length=64, unique=True)
    signature = models.CharField(_("signature"), max_length=64, blank=True)

    class Meta:
        verbose_name = _("digest of erased names")
        verbose_name_plural = _("digests of erased names")
        default_permissions = ()
        permissions = [("erase", _("Can erase customers"))]

    def __str__(self) -> str:
        return self.before

    @property
    def signed_text(self) -> str:
        """Return the text that is signed."""
        return f"erased {self.before} {self.after}"


def note(using: str, changed: Iterable[tuple[str, str]]) -> None:
    """Note digests that an erasure changed: pairs of a digest before and after.

    If an earlier erasure made the digest before, note the digest before that erasure instead.
    """
    unwritten = (pair for pair in changed if pair[0] != pair[1])
    while pairs := dict(islice(unwritten, _CHUNK)):
        earlier = originals(using, pairs)
        rows = [ErasedDigest(before=earlier.get(before, before), after=after) for before, after in pairs.items()]
        for row in rows:
            row.signature = signatures.sign(row.signed_text)
        ErasedDigest.objects.using(using).filter(before__in=[row.before for row in rows]).delete()
        ErasedDigest.objects.using(using).bulk_create(rows)


def originals(using: str, digests: Collection[str]) -> dict[str, str]:
    """Return the digest before the first erasure, for those of these digests that an erasure made."""
    found: dict[str, str] = {}
    in_order = sorted(digests)
    for first in range(0, len(in_order), _CHUNK):
        rows = ErasedDigest.objects.using(using).filter(after__in=in_order[first : first + _CHUNK])
        found.update(rows.values_list("after", "before"))
    return found


def first_digests(using: str, digests: Sequence[str]) -> list[str]:
    """Return digests in their order, each one as it was before an erasure changed it."""
    earlier = originals(using, set(digests)) if ErasedDigest.objects.using(using).exists() else {}
    return [earlier.get(digest, digest) for digest in digests]


def is_of(using: str, digest: str, recorded: str) -> bool:
    """Return whether a digest is the recorded one, or stands for it since names were erased."""
    return digest == recorded or originals(using, [digest]).get(digest) == recorded


def wrong_notes(using: str) -> Iterator[str]:
    """Yield a sentence for each note with a wrong signature."""
    for row in ErasedDigest.objects.using(using).order_by("pk").iterator(_CHUNK):
        if error := signatures.error_of(row.signed_text, row.signature):
            yield f"the note that an erasure changed the digest {row.before[:16]}… to {row.after[:16]}…: {error}"
