"""Starting points for a new rule: links that open the form with some fields already filled in."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from itertools import chain, count
from typing import NamedTuple
from urllib.parse import urlencode

from django.utils.functional import Promise
from django.utils.translation import gettext_lazy as _

from ratelimits.algorithms.windows import BILLING_PERIOD


class StartingPoint(NamedTuple):
    """A starting point: the text of its link, and the values of the form's fields."""

    text: str | Promise
    values: Mapping[str, str]


STARTING_POINTS: tuple[StartingPoint, ...] = (
    StartingPoint(
        _("5 per second, bursts to 10"),
        {"name": "burst", "algorithm": "token_bucket", "capacity": "10", "rate": "5", "period": "1"},
    ),
    StartingPoint(
        _("100,000 per month"),
        {"name": "monthly", "algorithm": "calendar_window", "capacity": "100000", "calendar_unit": "month"},
    ),
    StartingPoint(
        _("100,000 per billing period of each account"),
        {
            "name": "per-period",
            "algorithm": "calendar_window",
            "capacity": "100000",
            "calendar_unit": BILLING_PERIOD,
            "key_kind": "account",
        },
    ),
    StartingPoint(_("4 at once"), {"name": "at-once", "algorithm": "concurrency", "capacity": "4"}),
    StartingPoint(
        _("1,000 tokens a minute"),
        {"name": "tokens", "meter": "tokens", "algorithm": "sliding_window", "capacity": "1000", "period": "60"},
    ),
    StartingPoint(
        _("block: nothing passes"),
        {"name": "block", "algorithm": "fixed_window", "capacity": "0", "period": "60", "mode": "enforce"},
    ),
)


def links(taken: Collection[str] = ()) -> list[tuple[str, str | Promise]]:
    """Return the query string and the text of the link of each starting point.

    `taken` are the names of existing rules. A name that is taken gets a number: "burst-2".
    """
    return [
        ("?" + urlencode({**point.values, "name": _free_name(point.values["name"], taken)}), point.text)
        for point in STARTING_POINTS
    ]


def _free_name(name: str, taken: Collection[str]) -> str:
    numbered = (f"{name}-{number}" for number in count(2))
    return next(free for free in chain([name], numbered) if free not in taken)
