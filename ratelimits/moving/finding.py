"""A rate that was found in a project, and the rule that it becomes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from django.utils.text import slugify

from ratelimits.models.fields.scopes import SCOPE

#: Maximum characters of a rule's name.
_LONGEST_NAME = 40


@dataclass(frozen=True, slots=True)
class Finding:
    """A rate that was found in a project.

    found   the rate as the project writes it
    where   the views that it limits
    rule    the rule that replaces the rate, as an entry of rules as code (see the package as_code); None if no rule can
            replace the rate
    notes   how the rule differs from the rate, what to change in the code, or why there is no rule
    """

    found: str
    where: tuple[str, ...]
    rule: dict[str, Any] | None
    notes: tuple[str, ...] = ()


def is_scope(text: str) -> bool:
    """Return whether a rule can name this scope."""
    found = SCOPE.fullmatch(text)
    return found is not None and found["methods"] is None


def with_names(findings: Iterable[Finding]) -> list[Finding]:
    """Join findings that differ only in their views. Then give each rule a unique name, made from its present name."""
    joined: list[Finding] = []
    for finding in findings:
        index = next((index for index, other in enumerate(joined) if _same(finding, other)), None)
        if index is None:
            joined.append(finding)
        else:
            where = tuple(dict.fromkeys((*joined[index].where, *finding.where)))
            joined[index] = replace(joined[index], where=where)
    names: set[str] = set()
    return [_with_name(finding, names) for finding in joined]


def _same(one: Finding, other: Finding) -> bool:
    return (one.found, one.rule, one.notes) == (other.found, other.rule, other.notes)


def _with_name(finding: Finding, names: set[str]) -> Finding:
    if finding.rule is None:
        return finding
    start = slugify(finding.rule["name"]) or "rate"
    name, number = start[:_LONGEST_NAME], 1
    while name in names:
        number += 1
        name = f"{start[: _LONGEST_NAME - 4]}-{number}"  # The four characters are for the hyphen and the number.
    names.add(name)
    return replace(finding, rule={**finding.rule, "name": name})
