"""Make rules of all rates that were found in a project."""

from __future__ import annotations

from typing import NamedTuple

from ratelimits import as_code
from ratelimits.models import Rule
from ratelimits.moving.decorated import of_decorators
from ratelimits.moving.finding import Finding, with_names
from ratelimits.moving.throttles import of_throttles
from ratelimits.moving.views import views
from ratelimits.progress import Progress


class PlannedImport(NamedTuple):
    """A finding, and what an import does with it.

    sentence  the rule that replaces the found rate, in words; "" if no rule can replace it
    exists    whether a default rule already has the name of this rule. The import then does not write the rule
    """

    finding: Finding
    sentence: str
    exists: bool


def plan(using: str) -> list[PlannedImport]:
    """Return each rate that was found in the project, with the rule that replaces the rate."""
    all_views = views()
    findings = with_names([*of_throttles(all_views), *of_decorators(all_views)])
    existing = set(Rule.objects.using(using).filter(plan=None).values_list("name", flat=True))
    return [
        PlannedImport(finding, "", False)
        if finding.rule is None
        else PlannedImport(finding, Rule(**finding.rule).sentence(), finding.rule["name"] in existing)
        for finding in findings
    ]


def write(planned: list[PlannedImport], using: str, progress: Progress | None = None) -> list[str]:
    """Write the rules that do not exist yet, in one edit. Return a text for each of them.

    `progress` shows how many rules are done. If a rule is not valid, write nothing and raise as_code.RefusedError.
    """
    entries = [one.finding.rule for one in planned if one.finding.rule is not None and not one.exists]
    return as_code.load({"plans": {}, "rules": entries}, using, reason="ratelimits_import", progress=progress)
