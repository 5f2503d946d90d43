"""Make the digest of a report from its own columns and from all its lines.

One of these columns is made from the digests of the ledger's chains.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from functools import reduce
from operator import or_
from typing import Any

from django.db.models import Q

from ratelimits.billing.models import Report
from ratelimits.billing.reports.rows import COLUMNS, Row, report_id
from ratelimits.usage.models import ArchivedRange, Batch


class BrokenChainError(ValueError):
    """Raised if the ledger has no batch at the last position of a report's usage.

    The message names the position. If the batch was moved to an archive, the message names the archive instead.
    """


#: A shard, and a position in its chain. Batches have positions from 1 on.
ChainPosition = tuple[int, int]
#: Maximum number of positions in one query, because databases limit the depth of a condition.
_MAX_POSITIONS = 200


def chain_head(chain: Mapping[str, int], *sources: str) -> str:
    """Return one digest for several shards, made from the digest of one batch of each shard.

    `chain` maps each shard to the position of this batch. `sources` are the aliases of the databases that contain the
    batches. Raise BrokenChainError if a batch is missing.
    """
    positions = ((int(shard), position) for shard, position in chain.items())
    return joined_head(chain, digests_at(positions, *sources), sources[0])


def joined_head(chain: Mapping[str, int], digests: Mapping[ChainPosition, str], using: str) -> str:
    """Return one digest for several chains, made from the digests that `digests_at` has read.

    `using` is the database with the list of archives. Raise BrokenChainError if a digest is missing in `digests`.
    Position 0 needs no digest, because no batch has this position.
    """
    positions = sorted((int(shard), position) for shard, position in chain.items())
    for shard, position in positions:
        if position and (shard, position) not in digests:
            raise _broken(shard, position, using)
    parts = (f"{shard}:{position}:{digests.get((shard, position), '')}" for shard, position in positions)
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def digests_at(positions: Iterable[ChainPosition], *sources: str) -> dict[ChainPosition, str]:
    """Return the digest of the batch at each of these positions. Leave out positions without a batch.

    All positions are read together. So up to _MAX_POSITIONS shards need no more queries than one shard.
    """
    unread = {(shard, position) for shard, position in positions if position}
    digests: dict[ChainPosition, str] = {}
    for using in sources:
        # The list of archives keeps the digest of the last batch of each archived range.
        for model, column in ((Batch, "position"), (ArchivedRange, "last_position")):
            missing = sorted(unread)
            for first in range(0, len(missing), _MAX_POSITIONS):
                portion = missing[first : first + _MAX_POSITIONS]
                condition = reduce(or_, (Q(shard=shard, **{column: position}) for shard, position in portion))
                rows = model.objects.using(using).filter(condition).order_by().values_list("shard", column, "digest")
                digests |= {(shard, position): digest for shard, position, digest in rows}
            unread -= digests.keys()
    return digests


def _broken(shard: int, position: int, using: str) -> BrokenChainError:
    ranges = ArchivedRange.objects.using(using).filter(shard=shard, first_position__lte=position)
    archive = ranges.filter(last_position__gte=position).first()
    if archive is not None:
        return BrokenChainError(archived_message(archive.archive))
    return BrokenChainError(f"shard {shard:02d} has no batch at position {position}")


def archived_message(archive: str) -> str:
    """Return the message for a report with usage that was moved from the ledger to the archive with this name."""
    return f"its usage was moved to the archive {archive}: verify with this archive (--archive DIRECTORY)"


#: Encodes the texts of a line for the digest.
_encode = json.JSONEncoder(separators=(",", ":")).encode
#: The index of the column about gaps.
_GAPS = COLUMNS.index("durability_gap")


def own_columns(report: Report) -> list[Any]:
    """Return a report's own columns. They are the first part of the data from which the report's digest is made."""
    return [
        "ratelimits report 3",
        report.salt,
        report_id(report.customer_id, report.period_start),
        report.version,
        report.period_start,
        report.period_end,
        report.timezone,
        report.label,
        report.plan,
        report.included,
        report.since,
        report.chain,
        report.chain_head,
        report.gaps,
        report.previous_digest,
        report.prices,
        # Later versions of the app added columns. A report with the columns of version 1 must keep its old digest.
        *([{"columns": report.columns_version}] if report.columns_version > 1 else ()),
    ]


def name_of(report: Report) -> str:
    """Return the name of a version of a report in manifests, such as "gezdgnbvgy3tqojq.20261101T000000Z v1"."""
    return f"{report_id(report.customer_id, report.period_start)} v{report.version}"


def beginnings(reports: Iterable[Report]) -> dict[str, list[Any]]:
    """Return what the digest of each report begins with, its salt and its other own columns, by `name_of`.

    Whoever has these values and the lines of a report can make the digest again, without the database.
    """
    return {name_of(report): own_columns(report) for report in reports}


class Digest:
    """Computes the digest of a report. Add its lines in their order."""

    def __init__(self, report: Report) -> None:
        text = json.dumps(own_columns(report), sort_keys=True, separators=(",", ":"))
        self._digest = hashlib.sha256(text.encode())
        # The text about gaps can be long, and it is the same in all lines of a report, so it is encoded only once.
        self._gaps, self._encoded_gaps = "", '""'

    def add(self, row: Row) -> None:
        """Add the next line."""
        texts = row.texts()
        gaps = texts[_GAPS]
        if gaps != self._gaps:
            self._gaps, self._encoded_gaps = gaps, _encode(gaps)
        # Make the JSON list of all texts from three parts. `[:-1]` cuts off the closing bracket of the first part.
        before_gaps = _encode(texts[:_GAPS])[:-1]
        after_gaps = "".join(f",{_encode(text)}" for text in texts[_GAPS + 1 :]) if len(texts) > _GAPS + 1 else ""
        self._digest.update(f"\n{before_gaps},{self._encoded_gaps}{after_gaps}]".encode())

    def hexdigest(self) -> str:
        return self._digest.hexdigest()
