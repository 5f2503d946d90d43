"""The app's settings: the project's dict `RATELIMITS`, with the defaults below.

`conf.NAME` reads a setting. The value is cached until the signal `setting_changed`. If the value is not valid (see
`setting_rules`), reading it raises ImproperlyConfigured. `manage.py check` lists all invalid values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from django.conf import settings
from django.core.exceptions import ImproperlyConfigured
from django.core.signals import setting_changed
from django.utils.module_loading import import_string

from ratelimits.conf.setting_rules import complaint, wrong_entry

if TYPE_CHECKING:
    from django.http import HttpRequest
    from django.http.response import HttpResponseBase

DEFAULTS: dict[str, Any] = {
    "ENABLED": True,  # False: every request passes, and nothing is counted
    # Servers and databases
    "EMBEDDED": None,  # use of the embedded server: True, False, the folder of its data, or None (see conf/embedded.py)
    "CACHE_ALIAS": "default",  # the django-redis alias of the server that decides and counts
    "NAMESPACE": "default",  # part of every Redis key; different for each project that uses this server
    "SHARDS": 64,  # number of parts into which accounts are divided; a change moves accounts to other parts
    "DATABASE": "default",  # the database alias of the rules and the ledger
    # The caller of a request
    "USER": None,  # callable or path: takes a request, returns its user or None; default: request.user
    "API_KEY": None,  # callable or path: takes a request, returns its API key or None; default: request.auth
    "ACCOUNT": None,  # callable or path: takes a request, returns an account or None; default: the user, or the API key
    "ACCOUNT_MODEL": None,  # the model of the accounts, such as "shop.Tenant"; names of its rows do not contain it
    "ONE_ACCOUNT_PER_KEY": False,  # True: each user and API key has one account for ever; this saves calls in a cluster
    "NUM_PROXIES": None,  # number of trusted proxies that write X-Forwarded-For; by default DRF's setting is used
    "TRUSTED_PROXIES": [],  # networks of trusted proxies, such as "10.0.0.0/8"; "unix": proxies at a unix socket
    "ADDRESS_HEADER": "X-Forwarded-For",  # the header in which TRUSTED_PROXIES send the client's address
    "KEY_SEARCH": None,  # callable or path: takes a text, returns keys and names, for the admin's inspector
    # The decision
    "TIMEOUT": 0.25,  # maximum seconds for one call of Redis
    "MEMORY_BUDGET": 0.8,  # share of the server's maxmemory from which new addresses are counted together
    "FAILURE_POLICY": "allow",  # the answer while Redis does not answer: "allow" or "deny"; a rule can have its own
    "RELOAD_INTERVAL": 30,  # seconds after which a process reads the rules again, even if Redis reports no edit
    "DENY_CACHE_SECONDS": 1.0,  # maximum seconds for which a process repeats a refusal without asking Redis
    "PREFETCH_SECONDS": 1.0,  # maximum seconds for which a process spends permits that it took in advance
    "RECEIPT_TTL": 86_400,  # seconds for which a receipt can be refunded or settled
    "METERS": None,  # the meters in which views give a cost, beside those of rules; None: a process learns a few more
    "OUTBOUND_SCOPES": [],  # scopes of outbound calls and Celery tasks; the admin does not warn that no view has them
    "PATHS": [],  # path prefixes of views that the middleware limits: a list, or a dict prefix -> options
    "REFUSAL_RESPONSE": None,  # callable or path: takes a request and its answer, returns a response or None
    "BILL_ERRORS": False,  # True: requests with status 500 or above are billed; False: the middleware refunds them
    "MAX_WAITING": 100,  # maximum number of requests that wait in a process; further requests are refused instead
    "X_RATELIMIT_HEADERS": False,  # also send X-RateLimit-* fields
    "X_RATELIMIT_RESET": "seconds",  # X-RateLimit-Reset has the "seconds" from now, or the seconds since 1970 ("epoch")
    "SHADOW_HEADERS": False,  # send RateLimit fields as if shadow rules were enforced
    "TELEMETRY": [],  # "prometheus", "opentelemetry" or both; they count and time every decision
    # The recorder
    "RECORD_SAMPLE": 0,  # share of accounts and keys whose requests are recorded, from 0 to 1; 0: nothing is recorded
    "RECORD_SECONDS": 172_800,  # seconds for which recorded requests are kept
    "RECORD_ROWS": 1_000_000,  # maximum number of recorded requests that are kept; the oldest are deleted first
    # Usage and billing
    "UNITS": {},  # meter -> its unit on reports; default: the meter's name
    "SEAL_INTERVAL": 60,  # seconds from one sealing of the open batches to the next
    "FENCE": "aof",  # how a drain knows that Redis cannot lose a batch: aof, waitaof, wait, window, durable or none
    "FENCE_REPLICAS": 1,  # with FENCE "wait": the number of replicas that must have a batch
    "FENCE_WINDOW": 10,  # with FENCE "window": maximum seconds of writes that the server can lose
    "DRAIN_INTERVAL": 5,  # seconds between two drains into the ledger
    "COMPACT_INTERVAL": 3_600,  # seconds between two searches for ledger batches that can be joined
    "FINALISE_INTERVAL": 900,  # seconds between two searches for billing periods that can be finalised
    "GRACE_SECONDS": 3_600,  # minimum seconds from the end of a period until its report is finalised
    "PRORATION": "none",  # included quantity for a part of a period: the whole ("none"), or a share by time ("time")
    "LATE_USAGE": "version",  # late usage is added to a new "version" of its report, or to the next "period"
    "ADJUSTMENT_APPROVAL": False,  # an adjustment counts only after another person has approved it
    "PROCESS_TOTALS_INTERVAL": 10,  # seconds from one write of a process's totals to the next; 0: they are not written
    "SIGNING_KEY": "",  # key of the HMAC that signs reports; empty: reports have a digest without a key
    "SIGNING_KEYS_OLD": [],  # former values of SIGNING_KEY; signatures with these keys stay valid
    "BILLING_CUSTOMER": None,  # callable or path: takes an account, returns its name at Stripe or Lago
    "PUSH": {},  # billing systems that receive finalised reports: name -> options
    "PUSH_INTERVAL": 300,  # seconds between two searches for lines to push
    "PUSH_TIMEOUT": 30,  # maximum seconds for one request to a billing system
    # Alerts
    "ALERT_THRESHOLDS": [50, 80, 100],  # an alert is raised at these percentages of an included quantity or of a limit
    "ALERT_INTERVAL": 60,  # seconds between two searches for alerts that are due
    "ALERT_TIMEOUT": 10,  # maximum seconds for one call of a webhook
    "ALERT_PUBLIC_ONLY": True,  # True: webhooks of alerts are sent only to addresses of the public internet
}

#: Settings of code that needs no database. A project without the app in INSTALLED_APPS can have only these.
DECIDING = frozenset(
    {
        "ADDRESS_HEADER",
        "CACHE_ALIAS",
        "EMBEDDED",
        "ENABLED",
        "FAILURE_POLICY",
        "MEMORY_BUDGET",
        "NAMESPACE",
        "NUM_PROXIES",
        "RECEIPT_TTL",
        "REFUSAL_RESPONSE",
        "SHARDS",
        "TELEMETRY",
        "TIMEOUT",
        "TRUSTED_PROXIES",
        "X_RATELIMIT_HEADERS",
        "X_RATELIMIT_RESET",
    }
)
#: Settings that only an app above `ratelimits` reads, by the name of this app.
OF_APPS: dict[str, frozenset[str]] = {
    "ratelimits.usage": frozenset(
        {
            "ALERT_INTERVAL",
            "ALERT_PUBLIC_ONLY",
            "ALERT_THRESHOLDS",
            "ALERT_TIMEOUT",
            "COMPACT_INTERVAL",
            "DRAIN_INTERVAL",
            "FENCE",
            "FENCE_REPLICAS",
            "FENCE_WINDOW",
            "PROCESS_TOTALS_INTERVAL",
            "RECORD_ROWS",
            "RECORD_SAMPLE",
            "RECORD_SECONDS",
            "SEAL_INTERVAL",
            "SIGNING_KEY",
            "SIGNING_KEYS_OLD",
        }
    ),
    "ratelimits.billing": frozenset(
        {
            "ADJUSTMENT_APPROVAL",
            "BILLING_CUSTOMER",
            "FINALISE_INTERVAL",
            "GRACE_SECONDS",
            "LATE_USAGE",
            "PRORATION",
            "PUSH",
            "PUSH_INTERVAL",
            "PUSH_TIMEOUT",
        }
    ),
}
#: Settings whose value is a callable or its dotted path. (In the comments above, "path" means such a dotted path.)
CALLABLES = {"ACCOUNT", "API_KEY", "BILLING_CUSTOMER", "KEY_SEARCH", "REFUSAL_RESPONSE", "USER"}
#: The hint if RATELIMITS itself is not a dict.
A_DICT = 'Write a dict such as {"CACHE_ALIAS": "ratelimits"}.'
#: Settings that contain secrets. No message shows their values.
SECRETS = {"SIGNING_KEY", "SIGNING_KEYS_OLD", "PUSH"}


def shown(value: object, name: str = "", most: int = 200) -> str:
    """Return a value as text for a message. The text has at most `most` characters, and does not show a secret."""
    if name in SECRETS:
        return f"a {type(value).__name__} that is not shown, since it can contain a secret"
    try:
        text = repr(value)
    except ValueError:  # The value is an integer with more digits than Python converts to text.
        text = f"a {type(value).__name__} of too many digits"
    return text if len(text) <= most else f"{text[: most - 3]}..."


def wrong(name: str, value: object) -> str:
    """Say what a setting is that is not valid: "RATELIMITS['SHARDS'] is 0". If one entry is wrong, name this entry."""
    entry = None if name in SECRETS else wrong_entry(name, value)
    place, part = ("", value) if entry is None else (f"[{shown(entry[0], most=60)}]", entry[1])
    return f"RATELIMITS[{name!r}]{place} is {shown(part, name)}"


class Conf:
    """The settings as attributes. Reading an invalid value raises ImproperlyConfigured."""

    ENABLED: bool
    EMBEDDED: bool | str | None
    CACHE_ALIAS: str
    NAMESPACE: str
    SHARDS: int
    DATABASE: str
    USER: Callable[[HttpRequest], Any] | None
    API_KEY: Callable[[HttpRequest], Any] | None
    ACCOUNT: Callable[[HttpRequest], Any] | None
    ACCOUNT_MODEL: str | None
    ONE_ACCOUNT_PER_KEY: bool
    NUM_PROXIES: int | None
    TRUSTED_PROXIES: list[str]
    ADDRESS_HEADER: str
    KEY_SEARCH: Callable[[str], Iterable[tuple[str, str]]] | None
    TIMEOUT: float
    MEMORY_BUDGET: float
    FAILURE_POLICY: str
    RELOAD_INTERVAL: float
    DENY_CACHE_SECONDS: float
    PREFETCH_SECONDS: float
    RECEIPT_TTL: int
    METERS: list[str] | None
    OUTBOUND_SCOPES: list[str]
    PATHS: list[str] | dict[str, dict[str, Any]]
    REFUSAL_RESPONSE: Callable[[HttpRequest, Any], HttpResponseBase | None] | None
    BILL_ERRORS: bool
    MAX_WAITING: int
    X_RATELIMIT_HEADERS: bool
    X_RATELIMIT_RESET: str
    SHADOW_HEADERS: bool
    TELEMETRY: list[str]
    RECORD_SAMPLE: float
    RECORD_SECONDS: float
    RECORD_ROWS: int
    UNITS: dict[str, str]
    SEAL_INTERVAL: float
    FENCE: str
    FENCE_REPLICAS: int
    FENCE_WINDOW: float
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
    ALERT_PUBLIC_ONLY: bool

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            if name not in DEFAULTS:
                raise AttributeError(f"RATELIMITS has no setting {name!r}")
            project_settings = getattr(settings, "RATELIMITS", {})
            if not isinstance(project_settings, dict):
                raise ImproperlyConfigured(f"RATELIMITS is {shown(project_settings)}. {A_DICT}")
            value = project_settings.get(name, DEFAULTS[name])
            if hint := complaint(name, value):
                raise ImproperlyConfigured(f"{wrong(name, value)}. {hint}")
            if name in CALLABLES and isinstance(value, str):
                value = import_string(value)
            self.__dict__[name] = value
            return value

    def reload(self) -> None:
        """Forget all values. The next access reads the project's settings again."""
        self.__dict__.clear()


conf = Conf()


def _reload_on_change(*, setting: str, **kwargs: object) -> None:
    if setting == "RATELIMITS":
        conf.reload()


setting_changed.connect(_reload_on_change)
