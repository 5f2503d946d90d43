"""Try a rule before it is saved: show what the rule would admit, and the number of keys that it applies to."""

from __future__ import annotations

import time
from typing import Any

from django.utils.translation import gettext as _

from ratelimits.admin.rule_form.affected import affected
from ratelimits.admin.rule_form.chart import chart
from ratelimits.admin.rule_form.recorded import recorded_hour
from ratelimits.conf import conf
from ratelimits.engine.server import current_server
from ratelimits.models import Rule
from ratelimits.quota.standings import UNAVAILABLE
from ratelimits.simulate.trial import try_rule


def trial_of(rule: Rule | None, errors: list[str]) -> dict[str, Any]:
    """Return the values for the template: charts and numbers of keys, or the errors in the typed values."""
    if rule is None:
        return {"errors": errors or [_("Nothing was typed.")]}
    algorithm = rule.to_algorithm()
    context: dict[str, Any] = {"affected": affected(rule, algorithm)}
    if algorithm.admits_nothing:
        return context
    unit = conf.UNITS.get(rule.meter, rule.meter)
    try:
        trials = [*try_rule(current_server().wire, algorithm, rule.max_wait, time.time_ns() // 1000)]
        recorded = None if algorithm.leases else recorded_hour(rule)
    except UNAVAILABLE:
        return {**context, "redis_is_silent": True}
    if recorded is not None:
        trials.append(recorded)
    return {**context, "charts": [chart(trial, unit) for trial in trials]}
