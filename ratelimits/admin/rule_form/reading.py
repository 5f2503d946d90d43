"""A whole rule in sentences: its limit, its plan, what happens beyond the limit, and whether it is billed."""

from __future__ import annotations

from collections.abc import Iterator

from django.utils.translation import gettext as _

from ratelimits.algorithms.limits import ALGORITHMS
from ratelimits.models import Rule


def reading(rule: Rule) -> str:
    """Return the sentences of a rule. The rule may be unsaved."""
    return " ".join(_sentences(rule))


def _sentences(rule: Rule) -> Iterator[str]:
    yield f"{rule.sentence()}."
    if rule.plan is not None:
        yield _("For keys and accounts on the plan %(plan)s.") % {"plan": rule.plan}
    else:
        yield _("For everyone, except on plans with a rule of the same name.")
    if rule.mode == Rule.Mode.ENFORCE:
        yield _("Refuses what goes beyond it.")
    elif rule.mode == Rule.Mode.SHADOW:
        yield _("Shadow: only records what it would refuse, and refuses nobody.")
    else:
        yield _("Off: it limits and records nothing.")
    if rule.bills and rule.mode == Rule.Mode.ENFORCE:
        yield _("Ledger lines of what it admits name this rule.")
    elif rule.bills:
        yield _("Ledger lines would name this rule if it were enforced.")


def explanations() -> dict[str, str]:
    """Return one plain sentence for each algorithm."""
    return {name: _(kind.explanation) for name, kind in ALGORITHMS.items() if kind.explanation}
