"""The inspector's table of blocks and allows."""

from __future__ import annotations

from datetime import timedelta
from ipaddress import ip_network
from typing import NamedTuple

from django.db.models import Q
from django.utils.translation import gettext as _

from ratelimits import moments
from ratelimits.admin.typed import local_time
from ratelimits.conf import conf
from ratelimits.engine.keys import ledger_name
from ratelimits.identity import Identity
from ratelimits.models import Access
from ratelimits.models.keys import key_name
from ratelimits.rules import Snapshot
from ratelimits.status.additions import requests_of

#: For this time after its end, a block or allow is still shown.
_SHOWN_AFTER_END = timedelta(hours=25)
_DAY = 86_400
#: Maximum number of blocks and allows that are shown.
_MAX_ACCESS = 50


class ShownAccess(NamedTuple):
    """A block or allow of the inspected key, or of a network that contains its address.

    decides   whether this row decides about requests of the key now
    requests  the number of requests in 24 hours that the block refused, or that the allow let pass; None if it is not
              known
    """

    row: Access
    begins: str
    ends: str
    state: str
    decides: bool
    requests: str | None


def shown_access(identity: Identity, key: str, snapshot: Snapshot) -> list[ShownAccess]:
    """Return the blocks and allows of an identity's keys and networks. `key` is the inspected key.

    Some are in force, some begin later, and some have ended in the last 25 hours.
    """
    now, targets = moments.now(), targets_of(identity, key)
    rows = Access.objects.using(conf.DATABASE).filter(target__in=targets)
    rows = rows.filter(Q(valid_until=None) | Q(valid_until__gt=now - _SHOWN_AFTER_END)).order_by("-pk")
    deciding, count = snapshot.access(identity), requests_of()
    counts = None if count is None else count(targets, _DAY)
    accesses = []
    for row in rows[:_MAX_ACCESS]:
        begins_later = row.valid_from is not None and row.valid_from > now
        state = _("in force") if row.in_force(now) else _("later") if begins_later else _("ended")
        requests = None if counts is None else f"{counts.get(ledger_name(key_name(row.target)), 0):,}"
        decides = deciding is not None and deciding.pk == row.pk
        span = local_time(row.valid_from), local_time(row.valid_until)
        accesses.append(ShownAccess(row, *span, state, decides, requests))
    return accesses


def targets_of(identity: Identity, key: str) -> list[str]:
    """Return all targets of blocks and allows that concern an identity: its keys, and the networks of its address.

    `key` is the inspected key, as people write it.
    """
    keys = key, identity.api_key, identity.user, identity.account, identity.address
    targets = list(dict.fromkeys(one for one in keys if one))
    try:
        address = ip_network((identity.address or "").removeprefix("ip:"))
    except ValueError:  # There is no address, or it cannot be read.
        return targets
    return targets + [f"ip:{address.supernet(new_prefix=length)}" for length in range(address.prefixlen)]
