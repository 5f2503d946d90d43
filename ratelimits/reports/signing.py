"""Digests of reports, over the head of the ledger's chain and every line; an HMAC of them with SIGNING_KEY."""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Mapping

from ratelimits.conf import conf
from ratelimits.models import Batch, Report
from ratelimits.reports.rows import Row, report_id


class BrokenChainError(ValueError):
    """The ledger has no batch where a report's chain ends; the message names it."""


def chain_head(using: str, chain: Mapping[str, int]) -> str:
    """One digest of the digests that the shards' chains have at these positions."""
    parts = []
    for shard, position in sorted(chain.items(), key=lambda item: int(item[0])):
        digest = ""
        if position:
            rows = Batch.objects.using(using).filter(shard=int(shard), position=position)
            found = rows.values_list("digest", flat=True).first()
            if found is None:
                raise BrokenChainError(f"shard {int(shard):02d} has no batch at position {position}")
            digest = found
        parts.append(f"{int(shard)}:{position}:{digest}")
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


class Digest:
    """The digest of a report, line by line."""

    def __init__(self, report: Report) -> None:
        head = [
            "ratelimits report 1",
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
        ]
        self._digest = hashlib.sha256(json.dumps(head, sort_keys=True, separators=(",", ":")).encode())

    def add(self, row: Row) -> None:
        """The next line."""
        self._digest.update(b"\n" + json.dumps(row.texts(), separators=(",", ":")).encode())

    def hexdigest(self) -> str:
        return self._digest.hexdigest()


def signature(digest: str) -> str:
    """The HMAC-SHA256 of a digest with SIGNING_KEY, in hexadecimal; "" without a key."""
    key: str = conf.SIGNING_KEY
    return hmac.new(key.encode(), digest.encode(), hashlib.sha256).hexdigest() if key else ""
