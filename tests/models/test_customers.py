"""Test who is a customer: each account text is the name of one, for ever."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from django.core.exceptions import ValidationError
from django.core.management import call_command
from django.db import IntegrityError, connection, transaction
from django.db.models import ProtectedError, QuerySet

from ratelimits.models import Account, ConfigVersion, Customer, Name, customers
from ratelimits.models.accounts import IdentifierEditedError, SecondAccountError
from ratelimits.models.accounts.named import accounts_now, named_now
from ratelimits.models.customers import make_missing, unsaved_token, waiting_text
from ratelimits.models.keys import key_shard
from ratelimits.models.raw.adoption import adopt
from ratelimits.models.versions import editing
from tests.support.customers import present, resolve
from tests.support.reports.invoices import token
from tests.support.usage.traffic import at, flow, use

pytestmark = pytest.mark.django_db

BIN = at("2026-11-21T12:00") // 10**6


def test_a_saved_account_has_a_customer_and_keeps_it() -> None:
    acme = Account.objects.create(identifier="acme")
    (name,) = Name.objects.all()
    assert (name.identifier, name.since, name.until) == ("acme", 0, None)
    assert name.version == acme.version
    assert len(name.customer.token) == 16
    assert len(bytes.fromhex(name.customer.salt)) == 16
    before = token()
    acme.name = "Acme Ltd."
    acme.save()
    acme.delete()
    Account.objects.create(identifier="acme")
    assert token() == before
    assert Customer.objects.count() == Name.objects.count() == 1


def test_an_account_is_known_by_the_text_of_its_requests() -> None:
    Account.objects.create(identifier="Müller")
    stored = Account.objects.get().identifier
    assert Name.objects.get().identifier == stored


def test_bulk_writes_make_customers() -> None:
    Account.objects.bulk_create([Account(identifier=text) for text in ("b", "a")])
    assert sorted(Name.objects.values_list("identifier", flat=True)) == ["a", "b"]


def test_no_write_of_an_account_edits_its_identifier() -> None:
    row = Account.objects.create(identifier="Müller")
    row.name = "Müller"
    row.identifier = "Müller"  # as it is typed
    row.save()
    row.identifier = "bolt"
    said = "The identifier of an account cannot be edited. To rename M"
    for write in (
        row.save,
        lambda: Account.objects.update(identifier="bolt"),
        lambda: Account.objects.bulk_update([row], ["identifier"]),
    ):
        with pytest.raises(IdentifierEditedError, match=said), transaction.atomic():
            write()
    assert Name.objects.count() == 1


def further_text(text: str, of: str) -> None:
    Name.objects.create(identifier=text, customer=present("default", [of])[of], shard=key_shard(f"account:{text}"))


def write_raw(text: str) -> None:
    """Write a row as raw SQL does."""
    rows: Any = QuerySet(Account)
    rows.bulk_create([Account(identifier=text)])


def test_a_customer_has_one_account_whatever_writes_it(tmp_path: Path) -> None:
    Account.objects.create(identifier="acme")
    further_text("x", "acme")
    said = "x is a text of a customer who has the account acme already"
    loaded = tmp_path / "loaded.json"
    loaded.write_text(json.dumps([{"model": "ratelimits.account", "pk": 99, "fields": {"identifier": "x"}}]))
    writes: list[Callable[[], Any]] = [
        lambda: Account.objects.create(identifier="x"),
        lambda: Account.objects.bulk_create([Account(identifier="new"), Account(identifier="x")]),
        lambda: call_command("loaddata", str(loaded), verbosity=0),
    ]
    for write in writes:
        with pytest.raises(SecondAccountError, match=said), transaction.atomic():
            write()
    with pytest.raises(ValidationError, match=said):
        Account(identifier="x").full_clean()
    Account.objects.get(identifier="acme").delete()
    with pytest.raises(SecondAccountError), transaction.atomic():
        Account.objects.bulk_create([Account(identifier="acme"), Account(identifier="x")])
    Account.objects.create(identifier="x")
    assert list(Account.objects.values_list("identifier", flat=True)) == ["x"]


def test_each_record_of_an_account_says_about_whom_it_was() -> None:
    row = Account.objects.create(identifier="acme")
    Account.objects.update(name="Acme")
    Account.objects.bulk_update([row], ["name"])
    row.delete()
    Account.objects.bulk_create([Account(identifier="acme")])
    Account.objects.all().delete()
    write_raw("acme")
    with editing("default") as edit:
        adopt(edit, "ratelimits_reload")
    records = Account.history.order_by("history_id").values_list("history_type", "customer__token")
    assert list(records) == [(kind, token()) for kind in "+~~-+-+"]


def test_the_customer_of_a_row_that_raw_sql_wrote_is_made_when_the_row_is_recorded() -> None:
    write_raw("acme")
    assert not Name.objects.exists()
    with editing("default") as edit:
        adopt(edit, "ratelimits_reload")
    assert Account.history.get().customer == Name.objects.get().customer


def test_the_account_of_a_text_is_that_of_its_customer() -> None:
    acme = Account.objects.create(identifier="acme")
    further_text("x", "acme")
    waiting = waiting_text(Name.objects.get(identifier="x").customer)
    Account.objects.create(identifier="bolt")
    make_missing("default", ["cord"])
    found = accounts_now("default", ["acme", "x", waiting, "cord", "unknown"])
    assert found == {"acme": acme, "x": acme, waiting: acme}


@pytest.mark.usefixtures("fsync_at_once")
def test_the_tally_makes_the_customers_of_usage_without_an_edit() -> None:
    version = ConfigVersion.read("default")[0]
    use("acme")
    use("", key="ip:203.0.113.9")
    flow()
    use("acme")
    flow()
    assert sorted(Name.objects.values_list("identifier", "version")) == [("", 0), ("acme", 0)]
    assert ConfigVersion.read("default")[0] == version


def test_a_customer_with_a_name_cannot_be_deleted() -> None:
    make_missing("default", ["acme"])
    with pytest.raises(ProtectedError):
        Customer.objects.get().delete()


def test_a_text_names_the_customer_of_its_newest_name_that_has_begun() -> None:
    make_missing("default", ["acme", "", "bolt"])
    found = present("default", ["acme", "", "bolt"])
    Name.objects.filter(identifier="bolt").update(until=BIN)
    successor = Customer.objects.create()
    Name.objects.create(identifier="bolt", customer=successor, since=BIN, shard=0)
    uses = [("acme", BIN), ("", 0), ("bolt", BIN - 900), ("bolt", BIN), ("unknown", BIN)]
    assert resolve("default", uses) == {
        ("acme", BIN): found["acme"],
        ("", 0): found[""],
        ("bolt", BIN - 900): found["bolt"],
        ("bolt", BIN): successor,
    }
    Name.objects.filter(identifier="bolt", since=0).delete()
    assert resolve("default", [("bolt", BIN - 900)]) == {}


def test_many_customers_are_read_at_once(django_assert_num_queries: Any) -> None:
    make_missing("default", map(str, range(9)))
    with django_assert_num_queries(3):
        found = named_now("default", [*map(str, range(9)), "unknown"])
    assert {text: one.account for text, one in found.items()} == {text: text for text in found}
    assert (found["unknown"].pk, found["unknown"].token) == (None, unsaved_token("unknown"))


def test_the_database_refuses_two_customers_of_a_text_at_once_and_parts_of_a_quarter() -> None:
    make_missing("default", ["acme"])
    other = Customer.objects.create()
    for since, until in ((0, BIN), (-900, BIN), (1, BIN), (BIN + 899, BIN + 900), (BIN, None)):
        with pytest.raises(IntegrityError), transaction.atomic():
            Name.objects.create(identifier="acme", customer=other, since=since, until=until, shard=0)
    Name.objects.filter(identifier="acme").update(until=BIN)
    Name.objects.create(identifier="acme", customer=other, since=BIN, shard=0)


def test_whoever_only_asks_for_customers_makes_none() -> None:
    make_missing("default", ["acme"])
    found = named_now("default", ["acme", "bolt"])
    assert (found["acme"].pk is not None, found["bolt"].pk is None) == (True, True)
    assert len({found["acme"].token, found["bolt"].token, ""}) == 3
    assert named_now("default", ["bolt"])["bolt"].token == found["bolt"].token
    assert named_now("default", ["cord"])["cord"].token != found["bolt"].token
    assert list(Name.objects.values_list("identifier", flat=True)) == ["acme"]
    assert Customer.objects.count() == 1


def test_a_customer_whose_text_another_process_named_first_does_not_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    other = Customer.objects.create()

    def named_meanwhile(key: str) -> int:
        Name.objects.get_or_create(identifier="acme", defaults={"customer": other, "shard": 0})
        return 0

    monkeypatch.setattr(customers, "key_shard", named_meanwhile)
    make_missing("default", ["acme"])
    assert Name.objects.get().customer == other
    assert Customer.objects.get() == other


@pytest.mark.django_db(transaction=True)
def test_processes_that_meet_a_text_together_make_one_customer() -> None:
    together = threading.Barrier(4)

    def meet() -> None:
        try:
            together.wait()
            make_missing("default", ["c", "a", "b"])
        finally:
            connection.close()

    threads = [threading.Thread(target=meet) for _number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(Name.objects.values_list("identifier", flat=True)) == ["a", "b", "c"]
    assert Customer.objects.count() == 3
