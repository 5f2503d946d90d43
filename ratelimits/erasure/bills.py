"""Replacing a customer's names in adjustments, reports and deliveries to billing systems."""

from __future__ import annotations

from typing import Any

from ratelimits import signatures
from ratelimits.erasure.about import About
from ratelimits.models import PushDelivery, Report, ReportLine
from ratelimits.models.ledger import erased
from ratelimits.reports import signing
from ratelimits.reports.statements import version_rows
from ratelimits.reports.verify.manifest_sections import DELIVERY, TABLES, delivery_digest, rows_of
from ratelimits.salts import new_salt
from ratelimits.usage.retention.erase import NotErasedError

_CHUNK = 2000


def erase_adjustments(about: About) -> list[int]:
    """Replace the names in adjustments. Return the primary keys of the changed rows."""
    changed = list(about.adjustments())
    table = TABLES["adjustments"]
    model: Any = table.model
    rows = model.objects.using(about.using).filter(pk__in=[row.pk for row in changed])
    before = rows_of(rows, "pk", table.columns())
    for row in changed:
        rows.filter(pk=row.pk).update(
            account=about.account(row.account),
            key=about.pseudonyms.key(row.key) if row.key else "",
            reason=about.scrub.cut(row.reason, 300),
            salt=new_salt(),
        )
    after = rows_of(rows.all(), "pk", table.columns())
    erased.note(about.using, ((digest, after[pk]) for pk, digest in before.items()))
    return [row.pk for row in changed]


def erase_reports(about: About) -> int:
    """Replace the names on reports and in their deliveries. Return the number of changed lines.

    Raise NotErasedError if a report does not match its digest: an erasure would note what somebody has changed.
    """
    count = 0
    reports = Report.objects.using(about.using).filter(customer=about.customer).order_by("pk")
    for report in reports:
        if not erased.is_of(about.using, _digest(report), report.digest) or signatures.error_of(
            report.digest, report.signature
        ):
            raise NotErasedError(f"report {report} does not match its digest or its signature: run ratelimits_verify")
        deliveries = PushDelivery.objects.using(about.using).filter(report=report).order_by("pk")
        before = [delivery_digest(DELIVERY, values) for values in deliveries.values_list(*DELIVERY)]
        report.account = about.account(report.account)
        if report.prices:
            report.prices = {**report.prices, "account_name": about.scrub(report.prices["account_name"])}
        report.salt = new_salt()
        report.save(using=about.using)
        count += _erase_lines(about, report)
        for delivery in deliveries.iterator(_CHUNK):
            deliveries.filter(pk=delivery.pk).update(
                customer=about.scrub(delivery.customer),
                event=about.scrub.of_json(delivery.event),
                note=about.scrub.cut(delivery.note, 400),
            )
        after = [delivery_digest(DELIVERY, values) for values in deliveries.all().values_list(*DELIVERY)]
        erased.note(about.using, [(report.digest, _digest(report)), *zip(before, after, strict=True)])
    return count


def _erase_lines(about: About, report: Report) -> int:
    lines = ReportLine.objects.using(about.using).filter(report=report)
    count, changed = 0, []
    for line in lines.exclude(key="").order_by("pk").only("pk", "key").iterator(_CHUNK):
        line.key = about.pseudonyms.key(line.key)
        changed.append(line)
        if len(changed) == _CHUNK:
            count += lines.bulk_update(changed, ["key"])
            changed = []
    return count + (lines.bulk_update(changed, ["key"]) if changed else 0)


def _digest(report: Report) -> str:
    digest = signing.Digest(report)
    for row in version_rows(report):
        digest.add(row)
    return digest.hexdigest()
