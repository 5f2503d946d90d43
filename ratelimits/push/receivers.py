"""The billing systems in RATELIMITS["PUSH"]."""

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
SERVICES: dict[str, Service] = {service.name: service for service in (Stripe(), Lago(), OpenMeter())}
#: The last retry must be sent at least this long before the receiver forgets the event of the first request, because
#: clocks differ and requests take time.
MARGIN = timedelta(hours=1)


@dataclass(frozen=True)
class Receiver:
    """A billing system that receives events, with its options in the settings."""

    name: str
    service: Service
    #: The API key; "" if the billing system needs none.
    key: str
    #: The URL to which requests are sent.
    url: str
    #: The first month, such as "2026-11", whose reports are sent.
    since: str
    #: Returns the customer for an account; None or "" if the billing system does not bill the account.
    customer: Callable[[str], str | None]
    #: How long the billing system recognises a repeated event; None means for ever.
    remembers: timedelta | None

    @property
    def retried_for(self) -> timedelta | None:
        """Return for how long a request whose answer was lost is sent again; None means for ever."""
        return None if self.remembers is None else max(self.remembers - MARGIN, timedelta())


def receivers() -> list[Receiver]:
    """Return the billing systems, in the order of the settings."""
    return [_receiver(name, options) for name, options in conf.PUSH.items()]


def receiver(name: str) -> Receiver:
    """Return the billing system with this name. Raise KeyError if the settings do not list it."""
    return _receiver(name, conf.PUSH[name])


def _receiver(name: str, options: dict[str, object]) -> Receiver:
    service = SERVICES[str(options.get("FORMAT", name))]
    customer: object = options.get("CUSTOMER")
    if customer is None:
        customer = conf.BILLING_CUSTOMER if service.uses_billing_customer else None
    if isinstance(customer, str):
        customer = import_string(customer)
    # Without a function, the customer has the name of the account.
    customer_of = customer if callable(customer) else str
    hours = options.get("REMEMBERS", service.remembers)
    return Receiver(
        name=name,
        service=service,
        key=str(options.get("KEY", "")),
        url=str(options.get("URL", service.url)).rstrip("/") + service.path,
        since=str(options["SINCE"]),
        customer=lru_cache(maxsize=4096)(customer_of),
        remembers=None if hours is None else timedelta(hours=float(str(hours))),
    )
