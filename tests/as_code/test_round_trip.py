"""Test that a dump loads back to the same rules, and that a typed rate is read as numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from django.core.management import call_command

from ratelimits import as_code
from ratelimits.algorithms.limits import ALGORITHMS
from ratelimits.billing.models import PlanPrice
from ratelimits.models import ConfigVersion, Plan, PlanInclusion, Rule
from tests.support.rows import NEEDED, rule

pytestmark = pytest.mark.django_db(transaction=True)

#: Columns that a row gets when it is written.
WRITTEN = {"id", "since", "version", "counts_since", "plan_id"}


def rows() -> list[dict[str, Any]]:
    """Return all columns of all rules that a file can contain, with the slug of the plan."""
    found = Rule.objects.order_by("plan__slug", "name").values(
        "plan__slug", *[f.attname for f in Rule._meta.concrete_fields]
    )
    return [{name: value for name, value in row.items() if name not in WRITTEN} for row in found]


def load(tmp_path: Path, document: Any, *options: str) -> None:
    (path := tmp_path / "rules.json").write_text(document if isinstance(document, str) else json.dumps(document))
    call_command("ratelimits_rules", "load", str(path), *options)


def test_a_dump_loads_back_to_the_same_rules(tmp_path: Path) -> None:
    plan = Plan.objects.create(name="Pro", slug="pro", currency="EUR")
    PlanInclusion.objects.create(plan=plan, meter="requests", quantity=10_000)
    PlanPrice.objects.create(plan=plan, meter="requests", unit_price="0.10")
    assert NEEDED.keys() == ALGORITHMS.keys()
    for algorithm in ALGORITHMS:
        rule(algorithm.replace("_", "-"), algorithm)
    rule("burst", plan=plan, rate="0.000001", period="1.5", capacity=5, initial="3", bills=True)
    rule(
        "scoped",
        scope="search:POST",
        callers="anonymous",
        key_kind="ip",
        ipv4_prefix=24,
        ipv6_prefix=56,
        meter="tokens",
    )
    rule("tenant", key_kind="view_key", view_key="field:email|lower")
    rule(
        "shadow",
        mode="shadow",
        on_failure="deny",
        refusal_status=402,
        refusal_text="Pay first.",
        except_scopes="health",
    )
    rule(
        "monthly",
        "calendar_window",
        capacity=5,
        calendar_unit="month",
        key_kind="user",
        start_from_ledger=True,
        lasting=False,
    )
    before, text = rows(), as_code.to_text(as_code.dump("default"))
    assert len(before) == len(ALGORITHMS) + 5
    load(tmp_path, '{"plans": {}, "rules": []}', "--delete")
    assert (Rule.objects.count(), Plan.objects.count()) == (0, 0)
    load(tmp_path, text)
    assert rows() == before
    assert as_code.to_text(as_code.dump("default")) == text


@pytest.mark.parametrize(
    ("typed", "numbers"),
    [
        ({"rate": "3/min"}, ("token_bucket", 3, 3, 60)),
        ({"rate": "3/min", "capacity": 10}, ("token_bucket", 10, 3, 60)),
        ({"rate": "3/min", "period": "1 min"}, ("token_bucket", 3, 3, 60)),
        ({"rate": "100 per day", "algorithm": "sliding_log"}, ("sliding_log", 100, None, 86_400)),
        ({"rate": "10/5min", "algorithm": "fixed_window", "capacity": 10}, ("fixed_window", 10, None, 300)),
        ({"rate": "1/s", "algorithm": "smooth_bursty", "max_wait": 5}, ("smooth_bursty", None, 1, 1)),
        ({"capacity": 5, "rate": 1, "period": "1 h"}, ("token_bucket", 5, 1, 3600)),
    ],
)
def test_a_typed_rate_gives_the_numbers_and_the_default_algorithm(
    tmp_path: Path, typed: dict[str, Any], numbers: tuple[Any, ...]
) -> None:
    load(tmp_path, {"rules": [{"name": "typed", **typed}]})
    row = Rule.objects.get()
    assert (row.algorithm, row.capacity, row.rate, row.period) == numbers
    version = ConfigVersion.read("default")
    load(tmp_path, as_code.to_text(as_code.dump("default")))
    assert Rule.objects.get().version == row.version, "the dump says the same in numbers"
    assert ConfigVersion.read("default") == version
