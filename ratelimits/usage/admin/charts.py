"""What the count of usage adds to the status page and to the index: requests over time, and recent refusals."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple
from urllib.parse import urlencode

from django.contrib.admin import AdminSite
from django.db import DatabaseError
from django.http import HttpRequest
from django.template.loader import render_to_string
from django.urls import NoReverseMatch
from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString
from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from ratelimits.admin.inspected import inspect_url, may_inspect
from ratelimits.admin.status.page import Links
from ratelimits.conf import conf
from ratelimits.models import Rule
from ratelimits.moments import moment
from ratelimits.status.keys import typed_key
from ratelimits.usage.models import Line
from ratelimits.usage.models.totals import DAY, QUARTER
from ratelimits.usage.status.facts import before_first_drain
from ratelimits.usage.status.refusals import newest_refusals
from ratelimits.usage.status.usage_over_time import (
    KINDS,
    Dimension,
    Entry,
    Kind,
    UsageOverTime,
    Window,
    last_day,
    last_month,
    usage_over_time,
)

logger = logging.getLogger(__name__)

#: Functions that return a window of time, by the value of `?window=`.
WINDOWS = {"day": last_day, "month": last_month}
#: Maximum number of refusals that the index lists.
_MAX_REFUSALS = 5
#: In SVG units: the height of the highest bar, the gap between two bars, and the width of a bar together with a gap.
_HEIGHT, _GAP, _STEP = 100, 2, 10
#: Minimum height of a bar for a number above 0. So a bar for one refusal can be seen beside a bar for a million.
_MIN_HEIGHT = 2


def bars(kind: str, description: str, values: Sequence[int], labels: Sequence[str]) -> SafeString:
    """Return a chart with a bar for each value. The highest bar has the full height.

    When the pointer is over a bar, the browser shows the bar's label and value. `kind` is part of the CSS class that
    sets the colour. No text is drawn in the chart, because the browser would stretch the text.
    """
    highest = max(values, default=0)
    heights = [max(_HEIGHT * value // highest, _MIN_HEIGHT) if value else 0 for value in values]
    rectangles = format_html_join(
        "",
        '<rect x="{}" y="{}" width="{}" height="{}"><title>{}: {}</title></rect>',
        (
            (_STEP * number, _HEIGHT - height, _STEP - _GAP, height, label, f"{value:,}")
            for number, (height, value, label) in enumerate(zip(heights, values, labels, strict=True))
            if value
        ),
    )
    return format_html(
        '<svg class="ratelimits-bars ratelimits-{}" viewBox="0 0 {} {}" preserveAspectRatio="none" role="img"'
        ' aria-label="{}">{}</svg>',
        kind,
        max(_STEP * len(values) - _GAP, 1),
        _HEIGHT,
        description,
        rectangles,
    )


def may_view_lines(request: HttpRequest) -> bool:
    """Return whether the user may view ledger lines, and numbers that are calculated from ledger lines."""
    user: Any = request.user
    return bool(user.has_perm("ratelimits_usage.view_line"))


def requests_over_time(request: HttpRequest, site: AdminSite) -> Iterator[SafeString]:
    """Yield the part of the status page with the usage of the last 24 hours, or with `?window=month` of 30 days."""
    chosen = "month" if request.GET.get("window") == "month" else "day"
    window = WINDOWS[chosen](int(time.time()))
    usage = usage_over_time(window, request.GET.get("meter", ""))
    context = {
        "windows": [
            (name, label, f"?{urlencode({'window': name, 'meter': usage.meter})}#usage", name == chosen)
            for name, label in (("day", _("24 hours")), ("month", _("30 days")))
        ],
        "meters": [
            (meter, f"{count:,}", f"?{urlencode({'window': chosen, 'meter': meter})}#usage", meter == usage.meter)
            for meter, count in usage.meters.items()
        ],
        "kinds": list(_kinds(usage, window, Links(site, request))),
        "steps": [(_label(window, step.start), *(step.counts[kind] for kind in KINDS)) for step in usage.steps],
        "nothing_drained": "" if usage.meters else before_first_drain(conf.DATABASE),
        "since": f"{moment(window.start * 1_000_000):%Y-%m-%d %H:%M} UTC",
    }
    yield render_to_string("ratelimits/admin/status_usage.html", context)


def _label(window: Window, start: int) -> str:
    """Return the label of a step: its day, or its time of the day."""
    return f"{moment(start * 1_000_000):%Y-%m-%d}" if window.step == DAY else f"{moment(start * 1_000_000):%H:%M}"


def _kinds(usage: UsageOverTime, window: Window, links: Links) -> Iterator[dict[str, Any]]:
    """Yield the template's values for each kind of requests: a chart, and lists of accounts, keys and rules."""
    titles: dict[Kind, str] = {
        "admitted": _("Admitted"),
        "denied": _("Refused"),
        "shadow": _("Shadow-refused"),
        "unmetered": _("Unmetered"),
    }
    lists: dict[Dimension, str] = {"account": _("Accounts"), "key": _("Keys"), "rule": _("Rules")}
    labels = [_label(window, step.start) for step in usage.steps]
    for kind in KINDS:
        values = [step.counts[kind] for step in usage.steps]
        highest = max(values, default=0)
        description = _(
            "%(kind)s: bars from %(first)s to %(last)s. The highest bar is %(highest)s. A table below has all numbers."
        )
        values_of_description = {
            "kind": titles[kind],
            "first": labels[0],
            "last": labels[-1],
            "highest": f"{highest:,}",
        }
        yield {
            "name": kind,
            "title": titles[kind],
            "url": links.to_list("shadow") if kind == "shadow" else "",
            "total": f"{usage.totals[kind]:,}",
            "highest": f"{highest:,}",
            "chart": bars(kind, description % values_of_description, values, labels) if highest else "",
            "first": labels[0],
            "last": labels[-1],
            "lists": [
                (title, [_entry(dimension, entry, usage, links) for entry in usage.tops[kind][dimension]])
                for dimension, title in lists.items()
                # No rule decided about unmetered requests, so there is no list of rules for them.
                if (kind, dimension) != ("unmetered", "rule")
            ],
        }


def _lines_url(links: Links, account: str, key: str = "") -> str:
    """Return the URL of the ledger lines of an account, or of one key of the account."""
    term = f"{account} {key}" if key else account
    return links.to_list(Line._meta.model_name or "", {"q": term}) if account else ""


def _entry(dimension: Dimension, entry: Entry, usage: UsageOverTime, links: Links) -> dict[str, str]:
    """Return the texts of an entry. `details` has the account of a key, and the rule that refused most requests."""
    requests = f"{entry.requests:,}"
    if dimension == "rule":
        number = int(entry.name)
        name = usage.rule_names.get(number) or (_("rule %(number)s") % {"number": number} if number else _("no rule"))
        return {
            "name": name,
            "url": links.to_rule(entry.name) if number in usage.rule_names else "",
            "requests": requests,
        }
    rule = usage.rule_names.get(entry.rule) or (str(entry.rule) if entry.rule else "")
    by = _("mostly by %(rule)s") % {"rule": rule} if rule else ""
    if dimension == "account":
        return {
            "name": entry.name or _("anonymous"),
            "url": _lines_url(links, entry.name),
            "requests": requests,
            "details": by,
        }
    return {
        "name": entry.name,
        "url": _lines_url(links, entry.account, entry.name),
        "requests": requests,
        "details": ", ".join(filter(None, (entry.account, by))),
    }


def recent_refusals(request: HttpRequest, site: str) -> Iterator[SafeString]:
    """Yield the newest refusals for the index, if the user may see them and the admin site has an inspector.

    Before the first drain, yield instead a text that says what to start. If the database fails, yield nothing: the
    status strip shows the error.
    """
    text = ""
    try:
        refusals = _recent_refusals(request, site)
        if refusals == []:  # None would mean that the user may not see refusals.
            text = before_first_drain(conf.DATABASE)
    except (NoReverseMatch, DatabaseError) as error:
        logger.warning("The recent refusals could not be read: %s", error)
        refusals = None
    if refusals is not None:
        context = {"refusals": refusals, "nothing_drained": text}
        yield render_to_string("ratelimits/admin/recent_refusals.html", context)


def _refusing_name(rule: int, names: Mapping[int, str]) -> str:
    """Return the name of the rule that refused; "a block" for the number 0, which stands for blocks in the totals."""
    if not rule:
        return _("a block")
    return names.get(rule) or _("rule %(number)s") % {"number": rule}


class RecentRefusal(NamedTuple):
    """A line about the refusals of a key. `url` is the inspector's page about the key; "" if there is no such page."""

    text: str
    url: str


def _recent_refusals(request: HttpRequest, site: str) -> list[RecentRefusal] | None:
    """Return lines about the newest refusals, at most `_MAX_REFUSALS`. This makes two queries.

    Return None if the user may not see them. `site` is the name of the admin site.
    """
    if not (may_inspect(request) and may_view_lines(request)):
        return None
    rows = newest_refusals(time.time(), _MAX_REFUSALS)
    names = dict(Rule.objects.using(conf.DATABASE).filter(pk__in={row.rule for row in rows}).values_list("pk", "name"))
    refusals = []
    for row in rows:
        start = moment(row.start * 1_000_000)
        requests = ngettext("%(n)s request", "%(n)s requests", row.denied) % {"n": f"{row.denied:,}"}
        text = _("%(time)s UTC: %(rule)s refused %(requests)s of %(key)s") % {
            "time": f"{start:%H:%M}–{moment((row.start + QUARTER) * 1_000_000):%H:%M}",
            "requests": requests,
            "key": f"{row.key} ({row.account})" if row.account else row.key,
            "rule": _refusing_name(row.rule, names),
        }
        # The inspector has no page for a text that is not a key. It shows no refusals of a key without an account.
        has_page = row.account and typed_key(row.key) == row.key
        url = inspect_url(row.key, row.account, site) if has_page else ""
        refusals.append(RecentRefusal(text, url))
    return refusals
