"""Test that rules as code take rules per billing period, and that CSV files give them numbers and accounts' terms."""

from __future__ import annotations

import json
from contextlib import suppress
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from django.core.management import CommandError, call_command

from ratelimits import as_code, rules
from ratelimits.algorithms.limits import CalendarWindow
from ratelimits.identity import Identity
from ratelimits.models import Account, KeyOverride, Rule
from ratelimits.row_files import NotImportedError, SeenEffect, effect_of_file, import_rows
from ratelimits.row_files.tables import TABLES, read
from tests.support.usage.traffic import at

pytestmark = pytest.mark.django_db(transaction=True)

PER_PERIOD: dict[str, Any] = {
    "name": "per-period",
    "algorithm": "calendar_window",
    "capacity": 100,
    "calendar_unit": "billing_period",
    "key_kind": "account",
}
NOW = at("2026-11-20T00:00")


def command(tmp_path: Path, what: str, *changed: dict[str, Any]) -> str:
    """Run `ratelimits_rules diff` or `load` with a file of these rules; return what it prints."""
    (path := tmp_path / "rules.json").write_text(json.dumps({"rules": [PER_PERIOD | fields for fields in changed]}))
    out = StringIO()
    with suppress(SystemExit):  # The status of `diff` is 1 if something differs.
        call_command("ratelimits_rules", what, str(path), stdout=out)
    return out.getvalue()


def test_a_rule_is_loaded_and_dumped_without_terms(tmp_path: Path) -> None:
    command(tmp_path, "load", {})
    row = Rule.objects.get()
    assert row.sentence() == "100 requests per billing period, per account"
    assert as_code.dump("default")["rules"] == [PER_PERIOD]
    assert command(tmp_path, "diff", {}) == ""
    version = row.version
    command(tmp_path, "load", {})
    assert Rule.objects.get().version == version


def test_a_rule_per_month_becomes_one_per_billing_period_and_back(tmp_path: Path) -> None:
    monthly = {"calendar_unit": "month", "timezone": "Asia/Tokyo", "anchor": "2026-01-10T00:00"}
    command(tmp_path, "load", monthly)
    before, after = [line for line in command(tmp_path, "diff", {}).splitlines() if line[1:2] == " "]
    for field, value in monthly.items():
        assert f'"{field}": "{value}"' in before
    assert '"calendar_unit": "billing_period"' in after
    assert (before[0], after[0], "timezone" in after, "anchor" in after) == ("-", "+", False, False)
    command(tmp_path, "load", {})
    row = Rule.objects.get()
    assert (row.calendar_unit, row.timezone, row.anchor) == ("billing_period", "", "")
    command(tmp_path, "load", monthly)
    assert Rule.objects.get().sentence().startswith("100 requests per calendar month (Asia/Tokyo)")


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"timezone": "Asia/Tokyo"}, "Leave the time zone empty: a billing period is in the time zone of the account."),
        ({"timezone": "UTC"}, "Leave the time zone empty"),
        ({"anchor": "2026-01-10T00:00"}, "Leave the anchor empty: a billing period starts at the billing anchor"),
        ({"key_kind": "ip"}, "Count per account, caller, user or API key, or choose a month"),
        ({"key_kind": "global"}, "other keys have no billing period"),
        ({"key_kind": "api_key"}, "Count per account, or set RATELIMITS['ONE_ACCOUNT_PER_KEY']"),
        ({"calendar_unit": "billing period"}, "calendar_unit"),
        ({"frozen": [1, 2]}, "calendar_window has no field frozen"),
        ({"period": "1 month"}, "period"),
    ],
)
def test_a_file_with_a_wrong_rule_changes_nothing(
    tmp_path: Path, settings: Any, wrong: dict[str, Any], said: str
) -> None:
    settings.RATELIMITS = {**settings.RATELIMITS, "ACCOUNT": lambda request: "acme", "ONE_ACCOUNT_PER_KEY": False}
    with pytest.raises(CommandError) as raised:
        command(tmp_path, "load", {"name": "good"}, wrong)
    assert "rule 2" in str(raised.value) or "per-period" in str(raised.value)
    assert said in str(raised.value)
    assert not Rule.objects.exists()


def imported(model: Any, *texts: str) -> None:
    table = TABLES[model]
    file = read("\n".join(texts).encode(), table)
    effect, lines = effect_of_file(table, file, "default")
    assert list(lines)
    seen = SeenEffect(effect.digest, effect.version)
    import_rows(table, file, "default", seen, good_only=False, after_portion=lambda new, changed: None)


def window(account: str) -> tuple[int, tuple[int, int]]:
    """Return the capacity of an account's only limit, and its window at NOW."""
    (applied,) = rules.reload().applicable("*", "GET", Identity(account=f"account:{account}"))
    assert isinstance(applied.algorithm, CalendarWindow)
    return applied.algorithm.capacity, applied.algorithm.valid_span(NOW)


def test_csv_files_give_accounts_their_periods_and_their_numbers(tmp_path: Path) -> None:
    command(tmp_path, "load", {})
    header = "identifier,timezone,billing_anchor"
    imported(Account, header, "acme,Asia/Tokyo,2026-01-10T00:00", "initech,UTC,")
    imported(KeyOverride, "key,rule,capacity", "account:acme,per-period,7")
    assert window("acme") == (7, (at("2026-11-10T00:00+09:00"), at("2026-12-10T00:00+09:00")))
    assert window("initech") == (100, (at("2026-11-01T00:00"), at("2026-12-01T00:00")))
    imported(Account, header, "initech,America/New_York,2026-01-25T00:00")
    assert window("initech") == (100, (at("2026-10-25T00:00-04:00"), at("2026-11-25T00:00-05:00")))
    with pytest.raises(NotImportedError):
        imported(KeyOverride, "key,rule,period", "account:acme,per-period,60")
    with pytest.raises(NotImportedError):
        imported(Account, header, "acme,Mars/Olympus,")
