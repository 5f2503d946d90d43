"""Check files of a month against its manifest with the program of docs/billing/manifest.md, which asks no database."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from django.core.management import call_command
from django.test import Client, override_settings

from tests.billing.reports.test_amounts import adjust
from tests.billing.reports.verify.test_report import SIGNED
from tests.support.below import SITE
from tests.support.reports.invoices import account, close, spend, token
from tests.support.reports.priced import TIERS, priced
from tests.support.selection import few
from tests.support.snippets import snippet

pytestmark = pytest.mark.django_db(transaction=True)

KEY = str(SIGNED["SIGNING_KEY"])
#: Edits a file, the manifest and the salts.
Edit = Callable[[Any, Any, Any], None]


def call(command: str, *arguments: str, **options: Any) -> None:
    with override_settings(RATELIMITS=SIGNED):
        call_command(command, *arguments, stdout=io.StringIO(), stderr=io.StringIO(), **options)


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fsync_at_once: None) -> dict[str, Any]:
    """Write the files of a month with three customers, and run the program of the page on them."""
    monkeypatch.chdir(tmp_path)
    with override_settings(RATELIMITS=SIGNED):
        # A minimum and a volume price: one version has a line of each kind of amount.
        acme = priced(included=1, pricing="volume", unit_price=None, tiers=TIERS, flat_fee="4.005", minimum="30")
        spend(acme, "2025-10-10", 7)
        spend(acme, "2025-10-11", 4, key="api_key:ключ")
        spend(priced("two", unit_price="0.1055"), "2025-10-10", 9)
        spend(account("free", included=2), "2025-10-10", 3)
        close("2025-11-02")
        adjust(6, "2025-10-01T00:00:00+00:00")
        close("2025-11-03")
    call("ratelimits_report", period="2025-10", output="2025-10.amounts.json", salts="2025-10.salts.json")
    call("ratelimits_manifest", "2025-10", output=Path("2025-10.json"))
    names: dict[str, Any] = {}
    exec(compile(snippet("def differences").text, "docs/billing/manifest.md", "exec"), names)
    return names


def read(name: str) -> Any:
    return json.loads(Path(f"2025-10.{name}").read_text())


def found(program: dict[str, Any], edit: Edit = lambda *_files: None, **options: str) -> list[str]:
    """Return what the program says after an edit of the file, the manifest and the salts."""
    files = read("amounts.json"), read("json"), read("salts.json")
    edit(*files)
    return list(program["differences"](*files, **options))


def line(file: Any, **about: Any) -> Any:
    """Return the first line with these values."""
    return next(one for one in file["lines"] if about.items() <= one.items())


def remove(file: Any, account: str) -> None:
    """Remove all lines of an account."""
    file["lines"] = [each for each in file["lines"] if each["account"] != account]


def test_untouched_files_fit_with_the_key_and_without_it(program: dict[str, Any]) -> None:
    kinds = {each["charge_category"] for each in read("amounts.json")["lines"]}
    assert kinds == {"usage", "adjustment", "fee", "repricing", "minimum", "rounding"}
    assert program["found"] == found(program) == found(program, key=KEY) == []


def test_a_download_of_the_admin_fits_too(program: dict[str, Any], admin_client: Client) -> None:
    query = {"period": "2025-10", "format": "json-amounts", "final": "1", "lacking": "1"}
    answer = admin_client.get(f"{SITE}/admin/ratelimits_billing/report/download/", query)
    downloaded = json.loads(b"".join(answer.streaming_content))  # type: ignore[attr-defined]
    assert list(program["differences"](downloaded, read("json"), read("salts.json"), KEY)) == []


@pytest.mark.parametrize(
    "column",
    few(
        ["key", "account", "meter", "batch_range", "durability_gap", "consumed_quantity"],
        "account",
        "consumed_quantity",
    ),
)
def test_a_changed_line_is_named(program: dict[str, Any], column: str) -> None:
    def edit(file: Any, _manifest: Any, _salts: Any) -> None:
        line(file, charge_category="usage")[column] += "1"

    assert found(program, edit) == [f"{token()}.20251001T000000Z v1 has other lines"]


@pytest.mark.parametrize("category", few(["usage", "fee", "repricing", "minimum", "rounding"], "fee"))
def test_a_changed_amount_is_named(program: dict[str, Any], category: str) -> None:
    def edit(file: Any, _manifest: Any, _salts: Any) -> None:
        changed = line(file, charge_category=category)
        changed["amount"] += "1" if "." in changed["amount"] else ".001"

    said = found(program, edit)
    assert said
    assert {sentence.partition(" has ")[2] for sentence in said} == {"other amounts"}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda file: remove(file, "two"), "is in the manifest, but not in the file"),
        (lambda file: file["lines"].remove(line(file, charge_category="adjustment")), "v2 has other lines"),
        (
            lambda file: file["lines"].append({**line(file, account="free"), "report_version": 2}),
            "v2 is not in the manifest",
        ),
        (lambda file: file["lines"].insert(0, file["lines"].pop(1)), "v1 has other lines"),
        (lambda file: line(file).update(report_total="1.00"), "v1 has other amounts"),
        (lambda file: line(file).update(account_name="Two Ltd."), "v1 names another payer"),
        (lambda file: line(file, account="free").update(amount="1"), "has other amounts"),
    ],
)
def test_other_changes_of_the_file_are_named(program: dict[str, Any], change: Callable[[Any], Any], says: str) -> None:
    said = found(program, lambda file, _manifest, _salts: change(file))
    assert any(says in sentence for sentence in said), said


def test_a_changed_manifest_is_named_with_the_key(program: dict[str, Any]) -> None:
    def edit(file: Any, manifest: Any, _salts: Any) -> None:
        del manifest["reports"][f"{token('two')}.20251001T000000Z v1"]
        remove(file, "two")

    assert found(program, edit) == []
    assert found(program, edit, key=KEY) == ["the manifest was changed, or was signed with another key"]
    assert found(program, key="another") == ["the manifest was changed, or was signed with another key"]


def test_a_file_of_one_customer_needs_the_salts_of_its_reports_only(program: dict[str, Any]) -> None:
    call(
        "ratelimits_report", period="2025-10", account="two", output="2025-10.amounts.json", salts="2025-10.salts.json"
    )
    assert [*read("salts.json")] == [f"{token('two')}.20251001T000000Z v1"]
    assert found(program, customer=token("two"), key=KEY) == []
    assert len(found(program)) == 3  # the versions of the others are not in the file
    assert found(program, lambda _file, _manifest, salts: salts.clear(), customer=token("two")) == [
        f"{token('two')}.20251001T000000Z v1 is not in the manifest, or has no salt"
    ]
