"""Bill, correct and export two months of a project's usage.

Run it with `python -m tests.support.reports.exporter DIRECTORY`. The files must depend only on the usage: every
database, collation and clock must give the same files.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import UUID

import django

#: Names that different databases sort differently.
ACCOUNTS = ("acme", "Acme", "zoë", "Zoe", "_x", "a b", "ab", "ä", "10", "9")
KEYS = ("api_key:b", "api_key:B", "api_key:ä", "api_key:_", "user:10", "user:9", "=1+1")
MONTHS = ("2026-09", "2026-10")


def use(names: Sequence[str] = ACCOUNTS, keys: Sequence[str] = KEYS) -> None:
    """Make usage of accounts in four time zones and of nobody, finalise both months, and correct them.

    One account has prices, one an anchor, and one gets another plan. A rule is edited in between, a request is given
    back, replies and batches are lost, and a server restarts. Later come late usage and an adjustment. `names` are at
    least four accounts, and the first one is "acme".
    """
    from django.contrib.auth import get_user_model

    from ratelimits import engine
    from ratelimits.billing.models import Adjustment, Report
    from ratelimits.models import Customer, Name
    from ratelimits.models.keys import key_shard
    from ratelimits.usage.counting.process_totals import TotalKey
    from ratelimits.usage.ledger import process_totals
    from ratelimits.usage.models import DurabilityGap
    from tests.support.reports.edits import change, plan
    from tests.support.reports.invoices import account, close, spend
    from tests.support.reports.priced import priced
    from tests.support.rows import rule
    from tests.support.usage.traffic import at, flow

    # Tokens are random, so give the same ones in every database.
    for number, name in enumerate(("", *names)):
        customer = Customer.objects.create(token=f"customer{number:08d}", salt=f"{number:032x}")
        Name.objects.create(identifier=name, customer=customer, shard=key_shard(f"account:{name}"))
    monthly = rule("monthly", bills=True, key_kind="caller")
    zones = ("UTC", "Europe/Berlin", "America/Los_Angeles", "Asia/Kolkata")
    payers = [
        priced(names[0], included=5),
        account(names[1], included=40, timezone=zones[1], billing_anchor="2026-01-31T06:00"),
        *(account(name, included=40, timezone=zones[n % 4]) for n, name in enumerate(names[2:], 2)),
    ]
    # From midnight in Los Angeles on.
    change("2026-10-01T07:00", names[2], plan=plan("larger", 60))
    for month in MONTHS:
        for number, payer in enumerate(payers):
            for key in keys[: 2 + number % 6]:
                about: dict[str, Any] = {"key": key, "rule": monthly.pk, "version": monthly.version}
                spend(payer, f"{month}-{number + 3:02d}T12:00", 7 + number, **about)
                spend(payer, f"{month}-17T00:00", 3, meter="tokens", **about)
        spend("", f"{month}-18T00:00", 2, key="ip:203.0.113.9", rule=monthly.pk)
        receipt = spend(payers[0], f"{month}-20T08:00", 9, key="api_key:b", rule=monthly.pk).receipt
        assert receipt is not None
        engine.refund(receipt)
        flow()
        monthly.capacity = 20
        monthly.save()
    lost = TotalKey("unanswered", "acme", "api_key:b", "requests", at("2026-10-05") // 10**6)
    process_totals.write("p1", {lost: (2, 2)})
    DurabilityGap.objects.create(event="a restart", kind="restart", since=at("2026-10-04"), until=at("2026-10-05"))
    missing: dict[str, Any] = {"account": payers[2].identifier, "requests": 2, "units": 50}
    DurabilityGap.objects.create(
        event="lost batches", kind="missing", since=at("2026-10-06"), until=at("2026-10-07"), **missing
    )
    close("2026-11-02")
    spend(payers[3], "2026-10-21", 11, key="late")
    Adjustment.objects.create(
        reference=UUID(int=1),
        account="acme",
        period_start=datetime(2026, 10, 1, tzinfo=UTC),
        quantity=-5,
        reason="goodwill",
        author=get_user_model().objects.create(username="finance"),
    )
    close("2026-11-03")
    # Of each month one of each account and one of nobody, and the two corrections.
    assert Report.objects.count() == 2 * (len(names) + 1) + 2


def export(directory: Path) -> None:
    """Export both months in every format."""
    from django.core.management import call_command

    from ratelimits.billing.reports.exports import DOWNLOADS

    directory.mkdir(parents=True)
    for month in MONTHS:
        for form in DOWNLOADS:
            call_command("ratelimits_report", period=month, format=form, output=str(directory / f"{month}.{form}"))


def main(directory: Path) -> None:
    """Export three times: at first, while the ledger is in an archive, and after it was restored."""
    django.setup()
    from django.core.management import call_command

    from ratelimits.engine.server import current_server
    from ratelimits.usage.models import Line

    current_server().wire.client.config_set("appendfsync", "always")
    call_command("migrate", verbosity=0)
    use()
    export(directory / "first")
    out = io.StringIO()
    call_command("ratelimits_archive", directory / "archive", before="2026-11", stdout=out)
    assert not Line.objects.exists()
    export(directory / "pruned")
    call_command("ratelimits_archive", directory / "archive", restore=True, stdout=out)
    export(directory / "restored")
    call_command("ratelimits_verify", stdout=out)
    assert out.getvalue().endswith("No errors were found.\n"), out.getvalue()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
