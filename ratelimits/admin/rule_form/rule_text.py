"""A whole rule in sentences: its limit, its plan, what happens above the limit, whether it bills, and its effect."""

from __future__ import annotations

from collections.abc import Iterator

from django.utils.translation import gettext as _

from ratelimits.algorithms.limits import ALGORITHMS, Algorithm
from ratelimits.models import Rule
from ratelimits.models.rule_parts.refusal import RefusalStatus
from ratelimits.status.additions import RuleEffect, registered


def rule_text(rule: Rule) -> str:
    """Return the sentences of a rule. The rule may be unsaved, and may have no name yet."""
    return " ".join(_sentences(rule))


def _sentences(rule: Rule) -> Iterator[str]:
    yield f"{rule.sentence()}."
    if rule.plan is not None:
        yield _("For keys and accounts on the plan %(plan)s.") % {"plan": rule.plan}
    elif rule.name:
        yield _("For everyone, except on plans with a rule of the same name.")
    else:
        yield _("For everyone.")
    if rule.mode == Rule.Mode.ENFORCE:
        if rule.refusal_status == RefusalStatus.TOO_MANY:
            yield _("Requests above this limit are refused.")
        else:
            yield _("Requests above this limit are refused with the status %s.") % rule.refusal_status
    elif rule.mode == Rule.Mode.SHADOW:
        yield _("Shadow: the rule only records what it would refuse, and refuses nobody.")
    else:
        yield _("Off: the rule limits and records nothing.")
    if rule.bills and rule.mode == Rule.Mode.ENFORCE:
        yield _("This rule bills: the ledger lines of admitted requests name this rule.")
    elif rule.bills:
        yield _("If this rule is enforced, it bills: ledger lines will then name this rule.")


def effect(rule: Rule, algorithm: Algorithm) -> RuleEffect:
    """Return what a rule with this algorithm would do to the keys in use. The rule may be unsaved.

    If no used keys are known, only an enforced rule that admits nothing, and is for everyone, has an effect.
    """
    known = next((added.effect for added in registered if added.effect is not None), None)
    if known is not None:
        return known(rule, algorithm)
    refuses_everyone = algorithm.admits_nothing and rule.mode == Rule.Mode.ENFORCE and not rule.group
    return RuleEffect(_("Everyone would be refused.") if refuses_everyone else "", refuses_everyone)


def explanations() -> dict[str, str]:
    """Return a sentence about each algorithm, by the name of the algorithm."""
    return {name: _(kind.explanation) for name, kind in ALGORITHMS.items() if kind.explanation}
