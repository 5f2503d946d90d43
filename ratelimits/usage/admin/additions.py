"""What the count of usage adds to the pages of rules and keys."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

from django.contrib import admin
from django.http import HttpRequest
from django.template.loader import render_to_string
from django.utils.translation import gettext_lazy as _

from ratelimits.admin.inspected import InspectedAdmin
from ratelimits.admin.operate.chosen_key import may_view
from ratelimits.algorithms.limits import Algorithm
from ratelimits.engine.keys import ledger_name
from ratelimits.models import Rule
from ratelimits.status.additions import Additions, InspectedKey, Panel, RuleEffect, RulePage
from ratelimits.usage.admin.affected import affected
from ratelimits.usage.admin.charts import may_view_lines, recent_refusals, requests_over_time
from ratelimits.usage.admin.key_usage import shown_usage
from ratelimits.usage.admin.recorded import recorded_hour
from ratelimits.usage.admin.refusals import refusal_panels
from ratelimits.usage.admin.shadow import enforce_page
from ratelimits.usage.admin.yesterday import yesterday_page
from ratelimits.usage.models import PeriodUsage
from ratelimits.usage.status.refusals import refused_of_keys


def _inspector(asked: InspectedKey) -> Iterator[Panel]:
    if may_view(asked.request, asked.site, PeriodUsage) and asked.identity.account_id:
        usage = shown_usage(asked.identity.account_id, asked.now)
        yield Panel(render_to_string("ratelimits/admin/inspect_usage.html", {"usage": usage}))
    yield from refusal_panels(asked)


def _refused_column(page: InspectedAdmin, request: HttpRequest) -> Iterator[Any]:
    if not (page.refused_column and may_view_lines(request)):
        return
    counts: Counter[tuple[str, str]] | None = None

    @admin.display(description=_("refused in 24 hours"))
    def refused(row: Any) -> str:
        nonlocal counts
        if counts is None:
            listed = page.listed(request) or [row]
            counts = refused_of_keys([page.account_and_key(listed_row) for listed_row in listed], time.time())
        account, key = page.account_and_key(row)
        # Requests without an account are counted in one sum, so the requests of a single key are not known.
        return f"{counts[account, ledger_name(key)]:,}" if account else "–"

    yield refused


def _effect(rule: Rule, algorithm: Algorithm) -> RuleEffect:
    keys = affected(rule, algorithm)
    return RuleEffect(keys.text, keys.refuses_everyone)


ADDITIONS = Additions(
    status=requests_over_time,
    index=recent_refusals,
    inspector=_inspector,
    columns=_refused_column,
    effect=_effect,
    trials=recorded_hour,
    rule_pages=(
        RulePage(
            "yesterday",
            "yesterday/",
            yesterday_page,
            button=_("Try the rule on the requests of the last 24 hours, without saving it"),
            task=_("Would a limit have refused anyone in the last 24 hours?"),
        ),
        RulePage("enforce", "<path:object_id>/enforce/", enforce_page),
    ),
)
