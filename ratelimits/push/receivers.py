"""The billing systems of RATELIMITS["PUSH"], read from the settings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import lru_cache

from django.utils.module_loading import import_string

from ratelimits.conf import conf
from ratelimits.push.lago import Lago
from ratelimits.push.openmeter import OpenMeter
from ratelimits.push.service import Service
from ratelimits.push.stripe import Stripe

#: The kinds of billing systems, by name.
SERVICES: dict[str, Service] = {each.name: each for each in (Stripe(), Lago(), OpenMeter())}
#: A retry arrives so much before the receiver forgets the first request, at least: clocks differ, requests take time.
MARGIN = timedelta(hours=1)


@dataclass(frozen=True)
class Receiver:
    """One billing system, under its name in the settings."""

    name: str
    service: Service
    key: str
    url: str
    #: The month, like "2026-11", whose reports are the first that it gets.
    since: str
    #: An account to what the billing system calls it; None or "" for one that it does not bill.
    customer: Callable[[str], str | None]
    #: For how long a retry is recognised; None: for ever.
    remembers: timedelta | None

    @property
    def retried_for(self) -> timedelta | None:
        """For how long a request whose answer was lost may be repeated; None: for ever."""
        return None if self.remembers is None else max(self.remembers - MARGIN, timedelta())


def receivers() -> list[Receiver]:
    """Return the billing systems, in the order of the settings."""
    return [_receiver(name, options) for name, options in conf.PUSH.items()]


def receiver(name: str) -> Receiver:
    """Return the billing system of this name. Raises KeyError."""
    return _receiver(name, conf.PUSH[name])


def _receiver(name: str, options: dict[str, object]) -> Receiver:
    service = SERVICES[str(options.get("FORMAT", name))]
    customer: object = options.get("CUSTOMER")
    if customer is None:
        customer = conf.BILLING_CUSTOMER if service.asks_billing_customer else None
    if isinstance(customer, str):
        customer = import_string(customer)
    hours = options.get("REMEMBERS", service.remembers)
    return Receiver(
        name=name,
        service=service,
        key=str(options.get("KEY", "")),
        url=str(options.get("URL", service.url)).rstrip("/") + service.path,
        since=str(options["SINCE"]),
        customer=lru_cache(maxsize=4096)(customer if callable(customer) else str),
        remembers=None if hours is None else timedelta(hours=float(str(hours))),
    )
