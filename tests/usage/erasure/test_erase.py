"""Test that an erased customer is named nowhere, and that everything that was signed before still holds."""

from __future__ import annotations

import gzip
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from django.db.models import Sum

from ratelimits.billing.models import Report, ReportLine
from ratelimits.models import Account, Customer, KeyOverride, Name
from ratelimits.models.customers import make_missing
from ratelimits.usage.customers.move import move
from ratelimits.usage.erasure.erase import archives_in, erase, preview
from ratelimits.usage.ledger.retention import archive
from ratelimits.usage.ledger.retention.compact import compact
from ratelimits.usage.ledger.retention.erase import NotErasedError
from ratelimits.usage.models import Batch, ErasedDigest, Line, PeriodUsage, ShardState
from tests.support.customers import present
from tests.support.reports.edits import edit_at
from tests.support.reports.invoices import close, spend
from tests.support.reports.searched import found
from tests.support.selection import few
from tests.support.usage.traffic import at, flow
from tests.usage.erasure import books
from tests.usage.erasure.books import NAME, NAMES, TEXT, customer, manifests
from tests.usage.erasure.conftest import Findings

pytestmark = pytest.mark.django_db(transaction=True)

MONTHS = ("2026-09", "2026-10", "2026-11")


def sums() -> Counter[tuple[Any, ...]]:
    """Return what every bill is made of, by customer."""
    counted: Counter[tuple[Any, ...]] = Counter()
    for customer_, meter, period, units in PeriodUsage.objects.values_list("customer", "meter", "period").annotate(
        Sum("admitted_units")
    ):
        counted["total", customer_, meter, period] = units
    for report in Report.objects.all():
        counted["amounts", report.customer_id, report.label, report.version, str(report.amounts.get("total"))] = 1
    for line in ReportLine.objects.all():
        counted["line", line.report_id, line.line_id, line.consumed_quantity, line.overage_quantity] += 1
    for row in Line.objects.all():
        counted["ledger", row.batch_id, row.meter, row.bin, row.admitted_units] += 1
    return counted


@pytest.mark.parametrize("joined", few([False, True], True))
def test_an_erased_customer_is_nowhere_and_everything_that_was_signed_holds(joined: bool, findings: Findings) -> None:
    erased = books.write(joined=joined)
    given, before = manifests(*MONTHS), sums()
    assert findings(given) == []
    assert len(found(NAMES)) > 20
    digests = set(Report.objects.values_list("digest", "signature"))
    erase(erased)
    assert found(NAMES) == []
    assert findings(given) == []
    assert findings(manifests(*MONTHS)) == []
    assert sums() == before
    assert set(Report.objects.values_list("digest", "signature")) == digests
    assert Customer.objects.get(pk=erased.pk).salt == ""
    # Others keep their names.
    assert Line.objects.filter(account="globex", key="api_key:7").exists()
    assert KeyOverride.objects.get().key == "account:globex"
    with pytest.raises(NotErasedError, match="erased before"):
        erase(erased)


@pytest.mark.slow
def test_two_customers_of_one_text_are_erased_independently_of_each_other(findings: Findings) -> None:
    former, since = books.write(), at("2026-11-20") // 10**6
    later = move(TEXT, None, since).customer
    spend(TEXT, "2026-11-25", 5, key="user:grace")
    close("2026-12-02")
    given, before = manifests(*MONTHS), sums()
    assert findings(given) == []
    erase(former)
    assert findings(given) == []
    assert sums() == before
    assert present("default", [TEXT])[TEXT] == later
    assert Line.objects.filter(account=TEXT, key="user:grace").exists()
    assert not Line.objects.filter(account=TEXT, bin__lt=since).exists()
    erase(later)
    assert findings(given) == []
    assert sums() == before
    assert found((*NAMES, "grace")) == []


@pytest.mark.slow
def test_the_report_of_a_former_customer_does_not_have_the_name_of_an_erased_one(findings: Findings) -> None:
    former, since = books.write(), at("2026-11-20")
    later = move(TEXT, None, since // 10**6).customer
    with edit_at(since):
        Account.objects.create(identifier=TEXT, name="Grace Hopper")
    spend(TEXT, "2026-11-25", 5, key="user:grace")
    close("2026-12-02")
    assert found(["Grace Hopper"]) != []
    erase(later)
    assert found(["Grace Hopper"]) == []
    report = Report.objects.filter(customer__token=former.token).latest("pk")
    assert (report.label, report.prices["account_name"]) == ("2026-11", NAME)
    assert findings([]) == []


def test_a_text_that_another_customer_had_before_names_a_new_customer_after_an_erasure(findings: Findings) -> None:
    former = customer_of(TEXT)
    later = move(TEXT, None, at("2026-11-01") // 10**6).customer
    spend(TEXT, "2026-10-05", 2)
    spend(TEXT, "2026-11-05", 3)
    flow()
    erase(later)
    spend(TEXT, "2026-11-06", 4)
    flow()
    totals = PeriodUsage.objects.values_list("customer", "account", "admitted_units")
    third = customer()
    assert third not in (former, later)
    assert sorted(totals) == sorted(
        [(former.pk, TEXT, 2), (later.pk, later.names.get().identifier, 3), (third.pk, TEXT, 4)]
    )
    assert findings([]) == []


def customer_of(text: str) -> Customer:
    make_missing("default", [text])
    return customer(text)


@pytest.mark.slow
def test_a_customer_with_two_texts_has_one_bill_and_its_keys_have_one_pseudonym(findings: Findings) -> None:
    books.write()
    one = customer()
    move(books.OTHER_TEXT, one, at("2026-11-01") // 10**6)
    spend(books.OTHER_TEXT, "2026-11-07", 3, key="user:ada")
    close("2026-12-02")
    given, before = manifests(*MONTHS), sums()
    erase(one)
    assert found(NAMES) == []
    assert findings(given) == []
    assert sums() == before
    pseudonyms = {key for key in Line.objects.values_list("key", flat=True) if key.startswith("user:")}
    assert len(pseudonyms) == 12


@pytest.mark.slow
def test_what_is_changed_after_an_erasure_is_found(findings: Findings) -> None:
    erased = books.write(joined=True)
    given = manifests(*MONTHS)
    erase(erased)
    name = erased.names.get().identifier
    for model, filters, change in (
        (Line, {"account": name}, {"key": "user:~0"}),
        (Line, {"account": name}, {"account": "globex"}),
        (Line, {"account": name}, {"admitted_units": 1000}),
        (ReportLine, {"report__customer": erased.token}, {"key": "user:~0"}),
        (ReportLine, {"report__customer": erased.token}, {"consumed_quantity": 1000}),
        (Report, {"customer": erased.token}, {"salt": "00" * 16}),
        (Batch, {}, {"salt": "00" * 16}),
        (ErasedDigest, {}, {"after": "0" * 64}),
        (ErasedDigest, {}, {"before": "0" * 64}),
        (ErasedDigest, {}, {"signature": ""}),
    ):
        pk = model.objects.filter(**filters).latest("pk").pk
        rows = model.objects.filter(pk=pk)
        was = rows.values(*change).get()
        rows.update(**change)
        assert findings(given) != [], (model, change)
        rows.update(**was)
    pk = ErasedDigest.objects.latest("pk").pk
    ErasedDigest.objects.filter(pk=pk).delete()
    assert findings(given) != []


def test_what_was_changed_before_an_erasure_is_not_covered_by_it(findings: Findings) -> None:
    erased = books.write(joined=True)
    joined = Line.objects.filter(account=TEXT, batch__signature__gt="").latest("pk").batch_id
    for model, filters, change in (
        (Line, {"account": TEXT}, {"admitted_units": 1000}),
        (ReportLine, {"report__customer": erased.token}, {"consumed_quantity": 1000}),
        (Batch, {"pk": joined}, {"signature": "0" * 64}),
    ):
        pk = model.objects.filter(**filters).latest("pk").pk
        rows = model.objects.filter(pk=pk)
        was = rows.values(*change).get()
        rows.update(**change)
        with pytest.raises(NotErasedError, match="run ratelimits_verify"):
            erase(erased)
        rows.update(**was)
    assert Line.objects.filter(account=TEXT).exists()
    assert findings([]) == []


def test_batches_are_joined_after_an_erasure_and_erased_again(findings: Findings) -> None:
    erased = books.write()
    given, before = manifests(*MONTHS), sum(Line.objects.values_list("admitted_units", flat=True))
    erase(erased)
    ShardState.objects.update(watermark=at("2027-01-01"))
    assert list(compact())
    assert findings([]) == []
    other = customer("globex")
    erase(other)
    assert [error for error in findings(given) if "watermark" not in error] == []
    assert sum(Line.objects.values_list("admitted_units", flat=True)) == before
    assert found((*NAMES, "globex")) == []


def in_files(directory: Path) -> list[str]:
    """Return which archive files have one of the names."""
    return [
        path.name
        for path in archive.files(directory)
        if any(n in gzip.decompress(path.read_bytes()).decode() for n in NAMES)
    ]


def test_archives_are_written_again_and_come_back_without_the_names(tmp_path: Path, findings: Findings) -> None:
    erased = books.write(joined=True)
    given = manifests(*MONTHS)
    list(archive.prune("default", at("2026-11-01") // 10**6, tmp_path))
    assert in_files(tmp_path)
    before = sums()
    with pytest.raises(NotErasedError, match="were not given"):
        erase(erased)
    assert preview(erased).archives
    done = erase(erased, archives_in([tmp_path]))
    assert done.archives
    assert in_files(tmp_path) == []
    assert found(NAMES) == []
    paths = archive.files(tmp_path)
    assert findings(given, *paths) == []
    assert sums() == before
    for path in paths:
        archive.restore("default", path)
    assert findings(given) == []
    assert found(NAMES) == []


def test_files_of_restored_archives_are_refused(tmp_path: Path) -> None:
    erased = books.write()
    list(archive.prune("default", at("2026-11-01") // 10**6, tmp_path))
    paths = archive.files(tmp_path)
    for path in paths:
        archive.restore("default", path)
    with pytest.raises(NotErasedError, match="were restored"):
        erase(erased, paths)


def test_a_user_whom_another_customer_has_too_stays_there() -> None:
    erased = books.write()
    spend("globex", "2026-11-06", 1, key="user:ada")
    flow()
    erase(erased)
    assert Line.objects.get(key="user:ada").account == "globex"
    assert set(KeyOverride.objects.values_list("key", flat=True)) == {"account:globex", "user:ada"}


def test_anonymous_usage_is_not_erased() -> None:
    with pytest.raises(NotErasedError, match="Anonymous"):
        erase(customer_of(""))


def test_terms_and_prices_of_an_erased_customer_hold_for_its_open_periods(findings: Findings) -> None:
    erased = books.write()
    erase(erased)
    close("2026-12-02")
    row = Account.objects.get(identifier=Name.objects.get(customer=erased).identifier)
    assert (row.name, row.plan is not None) == ("", True)
    report = Report.objects.get(customer=erased, label="2026-11")
    assert report.account == row.identifier
    assert (report.plan, list(report.amounts["total"])) == ("plan-0", ["EUR"])
    assert findings(manifests(*MONTHS)) == []
