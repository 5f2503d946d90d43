"""Replacing a customer's names in adjustments, reports and deliveries to billing systems."""

from __future__ import annotations

from collections.abc import Iterator

from django.db.models import QuerySet
from django.utils.translation import gettext as _

from ratelimits.billing.models import Adjustment, PushDelivery, Report, ReportLine
from ratelimits.billing.reports import signing
from ratelimits.billing.reports.statements import version_rows
from ratelimits.billing.reports.verify.manifest_sections import DELIVERY, delivery_digest
from ratelimits.models import Customer
from ratelimits.salts import new_salt
from ratelimits.usage import signatures
from ratelimits.usage.erasure.about import About, ErasedPart, Replaced, replaced
from ratelimits.usage.ledger.retention.erase import NotErasedError
from ratelimits.usage.ledger.verify.row_digests import row_columns, rows_of
from ratelimits.usage.models import erased

_CHUNK = 2000


def _adjustments(about: About) -> QuerySet[Adjustment]:
    return Adjustment.objects.using(about.using).filter(customer=about.customer).order_by("pk")


def _reports(about: About) -> QuerySet[Report]:
    return Report.objects.using(about.using).filter(customer=about.customer).order_by("pk")


def _lines(about: About) -> QuerySet[ReportLine]:
    return ReportLine.objects.using(about.using).filter(report__customer=about.customer).exclude(key="")


def _keys(about: About) -> Iterator[str]:
    yield from _lines(about).order_by().values_list("key", flat=True).distinct()
    yield from _adjustments(about).values_list("key", flat=True)


def _words(about: About) -> Iterator[str]:
    for account, prices in _reports(about).values_list("account", "prices"):
        yield account
        yield prices.get("account_name", "")
    deliveries = PushDelivery.objects.using(about.using).filter(report__customer=about.customer)
    yield from deliveries.order_by().values_list("customer", flat=True).distinct()


def _obstacle(customer: Customer, using: str) -> str:
    deliveries = PushDelivery.objects.using(using).filter(report__customer=customer)
    states = (PushDelivery.State.WAITING, PushDelivery.State.UNSURE)
    count = deliveries.filter(state__in=states).count()
    text = _("%(count)s lines of its reports are not settled with a billing system: push or settle them first.")
    return text % {"count": f"{count:,}"} if count else ""


def _preview(about: About) -> Iterator[Replaced]:
    yield Replaced(_("report lines"), _lines(about).count())
    yield replaced(_("reports"), "report", _reports(about).values_list("pk", flat=True))
    yield replaced(_("adjustments"), "adjustment", _adjustments(about).values_list("pk", flat=True))


def _erase(about: About) -> Iterator[Replaced]:
    adjustments = _erase_adjustments(about)
    reports = list(_reports(about).values_list("pk", flat=True))
    yield Replaced(_("report lines"), _erase_reports(about))
    yield replaced(_("reports"), "report", reports)
    yield replaced(_("adjustments"), "adjustment", adjustments)


def _erase_adjustments(about: About) -> list[int]:
    """Replace the names in adjustments. Return the primary keys of the changed rows."""
    changed, columns = list(_adjustments(about)), row_columns(Adjustment)
    rows = Adjustment.objects.using(about.using).filter(pk__in=[row.pk for row in changed])
    before = rows_of(rows, "pk", columns)
    for row in changed:
        rows.filter(pk=row.pk).update(
            account=about.account(row.account),
            key=about.pseudonyms.key(row.key) if row.key else "",
            reason=about.scrub.cut(row.reason, 300),
            salt=new_salt(),
        )
    after = rows_of(rows.all(), "pk", columns)
    erased.note(about.using, ((digest, after[pk]) for pk, digest in before.items()))
    return [row.pk for row in changed]


def _erase_reports(about: About) -> int:
    """Replace the names on reports and in their deliveries. Return the number of changed lines.

    Raise NotErasedError if a report does not match its digest: an erasure would note what somebody has changed.
    """
    count = 0
    for report in _reports(about):
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


#: What the floor of bills erases of a customer.
BILLS = ErasedPart(_keys, _words, _obstacle, _preview, _erase)
