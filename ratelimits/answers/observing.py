"""Tell observers, such as metrics, about every decision."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import NamedTuple

from ratelimits.answers.answer import Answer
from ratelimits.engine import Decision
from ratelimits.engine.server import breaker
from ratelimits.signals import breaker_switched, request_refused


class RequestOutcome(StrEnum):
    """The result of a request.

    ADMITTED     Redis admitted it, or it spent a prefetched permit
    REFUSED      a rule refused it (or the fallback, while Redis did not answer)
    BLOCKED      a block refused it
    EXEMPT       an allow exempted it from all rules
    UNMETERED    there was no decision, and a failure policy let it pass
    UNAVAILABLE  there was no decision, and a failure policy refused it without counting it
    """

    ADMITTED = "admitted"
    REFUSED = "refused"
    BLOCKED = "blocked"
    EXEMPT = "exempt"
    UNMETERED = "unmetered"
    UNAVAILABLE = "unavailable"


class Observation(NamedTuple):
    """One decision.

    rule      the name of the rule with the binding limit; "" if no rule decided
    outcome   the result of the request
    shadow    the names of the rules in shadow mode that would have refused the request
    scope     the scope of the request
    started   when the decision began, in ns of the monotonic clock
    ended     when the decision ended, in ns of the same clock
    """

    rule: str
    outcome: RequestOutcome
    shadow: tuple[str, ...]
    scope: str
    started: int
    ended: int


#: The name that observers get for a limit without a name, such as the rate of a throttle class.
IN_CODE = "in code"
#: The functions that are called with True when this process stops asking Redis, and with False when it asks again.
breaker_observers: list[Callable[[bool], None]] = []
#: The functions that receive each decision. They must be quick, and raise nothing.
observers: list[Callable[[Observation], None]] = []


def observe(answer: Answer, scope: str, started: int, ended: int) -> None:
    """Tell all observers about the answer to a request."""
    observation = Observation(*_rule_outcome_and_shadow(answer), scope, started, ended)
    for observer in observers:
        observer(observation)


def _rule_outcome_and_shadow(answer: Answer) -> tuple[str, RequestOutcome, tuple[str, ...]]:
    """Return the fields `rule`, `outcome` and `shadow` of an answer's Observation."""
    decision = answer.decision
    if answer.access is not None:
        return "", RequestOutcome.EXEMPT if answer.allowed else RequestOutcome.BLOCKED, ()
    if decision is None:
        if answer.unavailable:
            return "", RequestOutcome.UNAVAILABLE, ()
        return "", RequestOutcome.UNMETERED if answer.allowed else RequestOutcome.REFUSED, ()
    rule = ""
    if decision.binding is not None:
        rule = decision.program.terms[decision.binding].name or IN_CODE
    outcome = RequestOutcome.ADMITTED if answer.allowed else RequestOutcome.REFUSED
    return rule, outcome, _shadow_refusals(decision)


def _shadow_refusals(decision: Decision) -> tuple[str, ...]:
    """Return the names of the rules in shadow mode that would have refused the request."""
    terms = decision.program.terms
    if not any(term.mode for term in terms):  # The mode ENFORCE is a false value, and SHADOW is a true value.
        return ()
    pairs = zip(terms, decision.standings, strict=True)
    return tuple(term.name for term, standing in pairs if term.mode and not standing.allowed)


def breaker_changed(is_open: bool) -> None:
    """Tell all observers, and the receivers of the signal, that this process stops asking Redis, or asks it again."""
    for observer in breaker_observers:
        observer(is_open)
    breaker_switched.send_robust(Answer, is_open=is_open)


breaker.on_change = breaker_changed


def refused(answer: Answer, identity: object, scope: str, method: str) -> None:
    """Send the signal of a refused request. `identity` is None for rates in code."""
    request_refused.send_robust(Answer, answer=answer, identity=identity, scope=scope, method=method)


async def arefused(answer: Answer, identity: object, scope: str, method: str) -> None:
    """Do the same as `refused`, in async code."""
    await request_refused.asend_robust(Answer, answer=answer, identity=identity, scope=scope, method=method)
