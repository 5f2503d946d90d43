"""Test the contract of the floors: what it refuses, and that its list of allowed imports can only become shorter."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from importlinter.domain.contract import ContractCheck

pytestmark = pytest.mark.system
FLOORS = {
    "decide": ["ratelimits.engine", "ratelimits.throttling"],
    "limit": ["ratelimits.quota", "ratelimits.throttling.by_rules"],
    "count": ["ratelimits.usage.ledger"],
    "bill": ["ratelimits.billing.reports"],
}
DOWN = [
    ("throttling.by_rules", "engine.decide"),
    ("quota.checking", "throttling"),
    ("billing.reports", "usage.ledger.drain"),
]


def checked(*arrows: tuple[str, str], ignored: tuple[str, ...] = (), **floors: list[str]) -> ContractCheck:
    """Return the result for an app with the imports DOWN and these ones, of which `ignored` are allowed."""
    from grimp import ImportGraph

    from tests.support.floors import FloorsContract

    graph = ImportGraph()
    for module in ("ratelimits", *(name for listed in FLOORS.values() for name in listed)):
        graph.add_module(module)
    for importer, imported in (*DOWN, *arrows):
        graph.add_import(importer=f"ratelimits.{importer}", imported=f"ratelimits.{imported}")
    allowed = [f"ratelimits.{importer} -> ratelimits.{imported}" for importer, imported in map(str.split, ignored)]
    options = {**FLOORS, **floors, "ignore_imports": allowed}
    return FloorsContract("the floors", {}, options).check(graph, verbose=False)


def test_imports_that_point_down_or_to_the_own_floor_are_kept() -> None:
    assert checked(("usage.ledger.drain", "usage.ledger.seal"), ("quota.checking", "quota.prepared")).kept


@pytest.mark.parametrize(
    ("importer", "imported"),
    [
        ("engine.decide", "quota.checking"),
        ("throttling", "throttling.by_rules"),
        ("quota.checking", "usage.ledger.drain"),
        ("usage.ledger.drain", "billing.reports"),
        ("engine.decide", "billing.reports"),
    ],
)
def test_an_import_that_points_up_breaks_it_unless_it_is_allowed(importer: str, imported: str) -> None:
    arrow = f"ratelimits.{importer}", f"ratelimits.{imported}"
    broken = checked((importer, imported))
    assert (broken.kept, broken.metadata["up"]) == (False, [arrow])
    assert checked((importer, imported), ignored=(f"{importer} {imported}",)).kept


def test_an_allowed_import_that_nobody_needs_breaks_it() -> None:
    from importlinter.domain.helpers import MissingImport

    with pytest.raises(MissingImport, match=r"ratelimits\.engine\.decide -> ratelimits\.quota\.checking"):
        checked(ignored=("engine.decide quota.checking",))
    needless = checked(ignored=("quota.checking throttling",))
    assert (needless.kept, needless.metadata["needless"]) == (
        False,
        [("ratelimits.quota.checking", "ratelimits.throttling")],
    )


def test_every_module_has_a_floor() -> None:
    floorless = checked(("moving", "engine.decide"))
    assert (floorless.kept, floorless.metadata["floorless"]) == (False, ["ratelimits.moving"])


def test_the_lists_of_the_floors_name_modules_that_exist_and_say_something() -> None:
    from importlinter.domain.contract import InvalidContractOptions

    with pytest.raises(ValueError, match=r"No such module: ratelimits\.gone"):
        checked(bill=["ratelimits.billing.reports", "ratelimits.gone"])
    with pytest.raises(InvalidContractOptions, match=r"Listed on two floors: ratelimits\.quota"):
        checked(count=["ratelimits.usage.ledger", "ratelimits.quota"])
    with pytest.raises(InvalidContractOptions, match=r"on the same floor: ratelimits\.usage\.ledger\.drain"):
        checked(count=["ratelimits.usage.ledger", "ratelimits.usage.ledger.drain"])
