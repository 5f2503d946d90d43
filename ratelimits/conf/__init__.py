"""The app's settings: the one dict `RATELIMITS` of the project over the defaults below.

`conf.NAME` reads one. A value is read once and kept until `setting_changed` tells of a new one. One that breaks its
rule (`setting_rules`) raises ImproperlyConfigured; `manage.py check` tells of all of them beforehand.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from django.conf import settings
from django.core.exceptions import ImproperlyConfigured
from django.core.signals import setting_changed
from django.utils.module_loading import import_string

from ratelimits.conf.setting_rules import complaint

if TYPE_CHECKING:
    from django.http import HttpRequest

DEFAULTS: dict[str, Any] = {
    # Where things are
    "CACHE_ALIAS": "default",  # the django-redis alias whose server decides and counts
    "NAMESPACE": "default",  # part of every Redis key: projects that share a server differ in it
    "SHARDS": 64,  # slots that accounts are spread over; fixed while usage is open
    "DATABASE": "default",  # the alias that rules and the ledger are written to
    # Who a request is
    "ACCOUNT": None,  # callable or dotted path: request -> account identifier or None; None: the user
    "NUM_PROXIES": None,  # proxies in front whose X-Forwarded-For is believed; None: DRF's setting
    # The decision
    "TIMEOUT": 0.25,  # seconds that one Redis call may take
    "FAILURE_POLICY": "allow",  # "allow" or "deny" when Redis is away and no rule says otherwise
    "RELOAD_INTERVAL": 30,  # seconds after which rules are read again even if nobody told of an edit
    "DENY_CACHE_SECONDS": 1.0,  # longest time that a process may repeat a refusal without asking Redis
    "PREFETCH_SECONDS": 1.0,  # longest time in which a process spends the permits that it took ahead
    "RECEIPT_TTL": 86_400,  # seconds in which a receipt can be refunded or settled
    "PATHS": [],  # path prefixes of plain Django views that the middleware governs, such as "/files/"
    "BILL_ERRORS": False,  # whether a response of 500 or above is billed; the middleware gives it back otherwise
    "MAX_WAITING": 100,  # requests that a process holds back at once; one more that would wait is refused
    "X_RATELIMIT_HEADERS": False,  # send X-RateLimit-* beside the RateLimit fields
    # Usage and billing
    "UNITS": {},  # meter -> its unit; default: the meter's own name
    "SEAL_INTERVAL": 60,  # seconds between two sealings of the open batches
    "FENCE": "aof",  # "aof": only fsynced batches reach the ledger; "none": also those that Redis may forget
    "DRAIN_INTERVAL": 5,  # seconds between two drains into the ledger
    "COMPACT_INTERVAL": 3_600,  # seconds between two looks for batches in the ledger that can be joined
    "FINALISE_INTERVAL": 900,  # seconds between two looks for billing periods that can be finalised
    "GRACE_SECONDS": 3_600,  # seconds after a period's end before its report may be finalised
    "PRORATION": "none",  # of what a plan includes: "none", or by the "time" that an account was on it
    "LATE_USAGE": "version",  # usage of a closed period: a further "version" of its report, or the next "period"
    "ADJUSTMENT_APPROVAL": False,  # whether an adjustment counts only when another person has approved it
    "PROCESS_TOTALS_INTERVAL": 10,  # seconds between two writings of what a process says it admitted; 0: never
    "SIGNING_KEY": "",  # key of the HMAC over a report's chain head; empty: a plain digest
    "SIGNING_KEYS_OLD": [],  # keys that were SIGNING_KEY before: what they signed still verifies
    "BILLING_CUSTOMER": None,  # callable or dotted path: account -> what Stripe or Lago calls it; None: the account
    "PUSH": {},  # billing systems that get what finalised reports say: name -> its options (docs/billing.md)
    "PUSH_INTERVAL": 300,  # seconds between two looks for what is to be pushed to them
    "PUSH_TIMEOUT": 30,  # seconds that the whole exchange of a request to one of them may take
    # Alerts
    "ALERT_THRESHOLDS": [50, 80, 100],  # percentages of an included quantity or a limit that raise one; []: none
    "ALERT_INTERVAL": 60,  # seconds between two looks for alerts that are due
    "ALERT_TIMEOUT": 10,  # seconds that the whole exchange with a webhook's receiver may take
}

CALLABLES = {"ACCOUNT", "BILLING_CUSTOMER"}
A_DICT = 'Write a dict such as {"CACHE_ALIAS": "ratelimits"}.'


#: Settings that hold secrets: no message shows their values.
SECRETS = {"SIGNING_KEY", "SIGNING_KEYS_OLD", "PUSH"}


def shown(value: object, name: str = "") -> str:
    """A value as a message has it: not for longer than a line, and not at all if the setting of this name is secret."""
    if name in SECRETS:
        return f"a {type(value).__name__} that is not shown, since it may hold a secret"
    try:
        text = repr(value)
    except ValueError:  # an integer of more digits than Python writes
        text = f"a {type(value).__name__} of too many digits"
    return text if len(text) <= 200 else f"{text[:197]}..."


class Conf:
    """Attribute access to the settings; an unknown name is an AttributeError, a wrong value ImproperlyConfigured."""

    CACHE_ALIAS: str
    NAMESPACE: str
    SHARDS: int
    DATABASE: str
    ACCOUNT: Callable[[HttpRequest], str | None] | None
    NUM_PROXIES: int | None
    TIMEOUT: float
    FAILURE_POLICY: str
    RELOAD_INTERVAL: float
    DENY_CACHE_SECONDS: float
    PREFETCH_SECONDS: float
    RECEIPT_TTL: int
    PATHS: list[str]
    BILL_ERRORS: bool
    MAX_WAITING: int
    X_RATELIMIT_HEADERS: bool
    UNITS: dict[str, str]
    SEAL_INTERVAL: float
    FENCE: str
    DRAIN_INTERVAL: float
    COMPACT_INTERVAL: float
    FINALISE_INTERVAL: float
    GRACE_SECONDS: int
    PRORATION: str
    LATE_USAGE: str
    ADJUSTMENT_APPROVAL: bool
    PROCESS_TOTALS_INTERVAL: float
    SIGNING_KEY: str
    SIGNING_KEYS_OLD: list[str]
    BILLING_CUSTOMER: Callable[[str], str | None] | None
    PUSH: dict[str, dict[str, Any]]
    PUSH_INTERVAL: float
    PUSH_TIMEOUT: float
    ALERT_THRESHOLDS: list[int]
    ALERT_INTERVAL: float
    ALERT_TIMEOUT: float

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            if name not in DEFAULTS:
                raise AttributeError(f"RATELIMITS has no setting {name!r}")
            given = getattr(settings, "RATELIMITS", {})
            if not isinstance(given, dict):
                raise ImproperlyConfigured(f"RATELIMITS is {shown(given)}. {A_DICT}")
            value = given.get(name, DEFAULTS[name])
            if hint := complaint(name, value):
                raise ImproperlyConfigured(f"RATELIMITS[{name!r}] is {shown(value, name)}. {hint}")
            if name in CALLABLES and isinstance(value, str):
                value = import_string(value)
            self.__dict__[name] = value
            return value

    def reload(self) -> None:
        """Forget what was read; the next access reads the project's settings again."""
        self.__dict__.clear()


conf = Conf()


def _reload_on_change(*, setting: str, **kwargs: object) -> None:
    if setting == "RATELIMITS":
        conf.reload()


setting_changed.connect(_reload_on_change)
