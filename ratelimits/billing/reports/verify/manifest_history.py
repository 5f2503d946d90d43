"""Make the sections of a manifest about the configuration and its history, and find later changes of this history."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

from django.db.models import Exists, F, Max, OuterRef, Q

from ratelimits.billing.reports.build import CHUNK
from ratelimits.models.raw.adoption import never_recorded, with_newest_record
from ratelimits.models.versioned import versioned_models
from ratelimits.progress import Progress
from ratelimits.usage.ledger.verify.row_digests import digest_of, record_columns, record_digest
from ratelimits.usage.models import erased


def history(
    using: str, listed: dict[str, Any] | None = None, progress: Progress | None = None
) -> dict[str, dict[str, Any]]:
    """Return a digest of the history of each model of the configuration, up to its newest record.

    `listed` is this section of an earlier manifest. If `listed` is given, make the digests from the same records and
    columns as that manifest.
    """
    section = {}
    total = sum(model.history.using(using).count() for model in versioned_models()) if progress is not None else None
    count = (progress or Progress()).counter("edits", total)
    for model in versioned_models():
        name = str(model._meta.model_name)
        records: Any = model.history.using(using)
        earlier = (listed or {}).get(name)
        if listed is not None and earlier is None:
            continue
        known = record_columns(model)
        columns = known if earlier is None else [column for column in earlier["columns"] if column in known]
        newest = (records.aggregate(newest=Max("pk"))["newest"] or 0) if earlier is None else earlier["newest"]
        digest = hashlib.sha256()
        unread = records.filter(pk__lte=newest).order_by("pk").values_list(*columns).iterator(CHUNK)
        while rows := list(islice(unread, CHUNK)):
            digest.update("".join(erased.first_digests(using, list(map(record_digest, rows)))).encode())
            count(len(rows))
        section[name] = {"newest": newest, "columns": columns, "digest": digest.hexdigest()}
    return section


def digests_without_history(using: str) -> dict[str, str]:
    """Return a digest of each row of the configuration that has no history, by model and primary key."""
    digests = {}
    for model in versioned_models():
        columns = [field.attname for field in model._meta.concrete_fields]
        rows = never_recorded(model, using).order_by("pk").values_list("pk", *columns)
        digests.update({f"{model._meta.model_name} {pk}": digest_of(values) for pk, *values in rows.iterator(CHUNK)})
    return digests


def newer_than_history(using: str, listed: Mapping[str, dict[str, Any]]) -> dict[str, str]:
    """Return a digest of each row whose `version` or `since` is above that in the newest record of its history.

    The keys are the model and the primary key. Such rows exist after a fixture with history was loaded: each row gets a
    new version then, but its records keep the old ones. The digest is made from `version` and `since`. `listed`
    is the section `history` of a manifest. Rows that were edited after this manifest are left out.
    """
    digests = {}
    for model in versioned_models():
        name = str(model._meta.model_name)
        if name not in listed:
            continue
        records: Any = model.history.using(using)
        newer = records.filter(id=OuterRef("pk"), pk__gt=listed[name]["newest"])
        rows = with_newest_record(model, using).filter(~Exists(newer)).order_by("pk")
        rows = rows.filter(Q(version__gt=F("recorded")) | Q(since__gt=F("recorded_since")))
        digests.update({f"{name} {row.pk}": digest_of((row.version, row.since)) for row in rows.iterator(CHUNK)})
    return digests


def backdated_records(using: str, listed: dict[str, Any], since: int) -> Iterator[str]:
    """Yield the names of records that were added after a manifest, but are dated before `since` (µs)."""
    for model in versioned_models():
        records: Any = model.history.using(using)
        entry = listed.get(str(model._meta.model_name))
        if entry is not None:
            for record in records.filter(pk__gt=entry["newest"], since__lt=since).order_by("pk"):
                yield f"{model._meta.verbose_name} {record.id} (record {record.pk})"
