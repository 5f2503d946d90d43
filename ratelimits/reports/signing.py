"""Make the digest of a report from its own columns, from the digests of the ledger's chains, and from every line."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from ratelimits.models import ArchivedRange, Batch, Report
from ratelimits.reports.rows import COLUMNS, Row, report_id


class BrokenChainError(ValueError):
    """Raised if the ledger has no batch at the last position of a report's usage; the message names the position."""


def chain_head(chain: Mapping[str, int], *sources: str) -> str:
    """Return one digest for several chains, made from the digest of each shard's chain at its position in `chain`.

    `sources` are the aliases of the databases that contain the batches. Raises BrokenChainError.
    """
    parts = [
        f"{shard}:{position}:{_digest_at(int(shard), position, sources)}"
        for shard, position in sorted(chain.items(), key=lambda item: int(item[0]))
    ]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _digest_at(shard: int, position: int, sources: Sequence[str]) -> str:
    if not position:
        return ""
    for using in sources:
        rows = Batch.objects.using(using).filter(shard=shard, position=position)
        archived = ArchivedRange.objects.using(using).filter(shard=shard, last_position=position)
        for digests in (rows.values_list("digest", flat=True), archived.values_list("digest", flat=True)):
            if digest := digests.first():
                return digest
    ranges = ArchivedRange.objects.using(sources[0]).filter(shard=shard, first_position__lte=position)
    archive = ranges.filter(last_position__gte=position).first()
    if archive is not None:
        raise BrokenChainError(moved(archive.archive))
    raise BrokenChainError(f"shard {shard:02d} has no batch at position {position}")


def moved(archive: str) -> str:
    """Return the message for a report with usage that was moved from the ledger to the archive with this name."""
    return f"its usage was moved to the archive {archive}: verify with this archive (--archive DIRECTORY)"


#: Encodes the texts of a line for the digest.
_encode = json.JSONEncoder(separators=(",", ":")).encode
_GAPS = COLUMNS.index("durability_gap")


def head(report: Report) -> list[Any]:
    """Return a report's own columns, from which its digest is made before the lines are added."""
    return [
        # A report without prices must have the same digest as in versions of this app that had no prices.
        "ratelimits report 2" if report.prices else "ratelimits report 1",
        report_id(report.account, report.period_start),
        report.version,
        report.period_start,
        report.period_end,
        report.timezone,
        report.plan,
        report.included,
        report.since,
        report.chain,
        report.chain_head,
        report.gaps,
        report.previous_digest,
        *([report.prices] if report.prices else ()),
        # A report with only the first columns must have the same digest as before more columns were added.
        *([{"columns": report.columns_version}] if report.columns_version > 1 else ()),
    ]


class Digest:
    """Computes the digest of a report. Add its lines in their order."""

    def __init__(self, report: Report) -> None:
        text = json.dumps(head(report), sort_keys=True, separators=(",", ":"))
        self._digest = hashlib.sha256(text.encode())
        # The text about gaps may be long, and it is the same in all lines of a report, so it is encoded only once.
        self._gaps, self._encoded_gaps = "", '""'

    def add(self, row: Row) -> None:
        """Add the next line."""
        texts = row.texts()
        gaps = texts[_GAPS]
        if gaps != self._gaps:
            self._gaps, self._encoded_gaps = gaps, _encode(gaps)
        after_gaps = "".join(f",{_encode(text)}" for text in texts[_GAPS + 1 :]) if len(texts) > _GAPS + 1 else ""
        self._digest.update(f"\n{_encode(texts[:_GAPS])[:-1]},{self._encoded_gaps}{after_gaps}]".encode())

    def hexdigest(self) -> str:
        return self._digest.hexdigest()
