"""The valid values of each setting, and the sentence that tells people which values they can write."""

from __future__ import annotations

import re
from collections.abc import Callable
from inspect import isasyncgenfunction, isgeneratorfunction
from ipaddress import ip_network
from typing import Any, NamedTuple

from django.apps import apps
from django.conf import settings
from django.utils.module_loading import import_string

#: Maximum seconds of any setting: ten years, which every clock and socket can handle.
LONGEST = 315_360_000
#: Maximum seconds for which a caller can wait for an answer.
LONGEST_CALL = 3600
#: Maximum seconds for a request to a webhook or a billing system. It must be well below 300 s: after 300 s, another
#: worker can send the same request again.
LONGEST_POST = 100
#: Maximum seconds of FENCE_WINDOW. A drain waits for this time on each server.
LONGEST_WINDOW = 300
#: Maximum characters of a text in a report's column, such as the name of a meter or a unit.
LONGEST_UNIT = 255
#: Maximum cost of a request in one meter.
MAX_COST = 2**40
#: Maximum number of names in METERS.
MOST_METERS = 1_000
#: In TRUSTED_PROXIES: a proxy that connects by a unix socket, and so has no address.
UNIX = "unix"
#: The name of a header field.
_HEADER = re.compile(r"[A-Za-z0-9-]{1,100}")
#: The part of a request that contains the view's key: a source and a name. "header:X-Tenant" is the header X-Tenant. A
#: transform can follow, as in "field:email|lower".
_KEY = re.compile(r"(header|query|field|arg):[^\s=|]([^=|]*[^\s=|])?(\|lower)?")
#: A namespace, or the name of a billing system.
_NAMESPACE = re.compile(r"[A-Za-z0-9_.-]{1,40}")


#: The name of a meter. Rules and prices can have no other meters.
_METER = re.compile(rf"[-a-zA-Z0-9_]{{1,{LONGEST_UNIT}}}")


class SettingRule(NamedTuple):
    """The valid values of a setting."""

    #: The text that follows the word "Write" in a message.
    hint: str
    #: Returns whether a value is valid.
    is_valid: Callable[[Any], bool]


def _is_whole(minimum: int, maximum: int) -> Callable[[Any], bool]:
    return lambda value: type(value) is int and minimum <= value <= maximum


def _is_number(value: Any) -> bool:
    return type(value) in (int, float)


def _is_text(value: Any) -> bool:
    """Return whether a value is text that every encoding, database and header can contain."""
    return isinstance(value, str) and value.isprintable()


def _is_meter(value: Any) -> bool:
    return isinstance(value, str) and _METER.fullmatch(value) is not None


def _one_of(*words: str) -> SettingRule:
    return SettingRule(
        f"one of {', '.join(map(repr, words))}.", lambda value: isinstance(value, str) and value in words
    )


def _seconds(maximum: float = LONGEST, *, may_be_zero: bool = False) -> SettingRule:
    minimum = "from 0" if may_be_zero else "above 0"
    return SettingRule(
        f"a number of seconds {minimum} up to {maximum:,}.".replace(",", "_"),
        lambda value: _is_number(value) and (value >= 0 if may_be_zero else value > 0) and value <= maximum,
    )


def _is_callable(value: Any) -> bool:
    return value is None or callable(import_string(value) if isinstance(value, str) else value)


def _is_hook(value: Any) -> bool:
    """Return whether a value can be asked who makes a request. A generator would be another object at each call."""
    hook = import_string(value) if isinstance(value, str) else value
    return hook is None or (callable(hook) and not isgeneratorfunction(hook) and not isasyncgenfunction(hook))


def _is_model(label: str) -> bool:
    try:
        return apps.get_model(label) is not None
    except LookupError:
        return False


_CALLABLE = SettingRule("a callable, the dotted path of a callable, or None.", _is_callable)
_HOOK = SettingRule(
    "a callable, sync or async, that takes a request and returns a row, a text, a whole number, a UUID or None; the"
    " dotted path of such a callable; or None.",
    _is_hook,
)
_BUDGET = SettingRule("a number above 0 up to 0.95.", lambda value: _is_number(value) and 0 < value <= 0.95)
_FLAG = SettingRule("True or False.", lambda value: isinstance(value, bool))
#: The options of a path, each with a function that returns whether a value is valid. Only the scope "*" has a star, and
#: no scope has a space, a colon or a comma.
_PATH_OPTIONS: dict[str, Callable[[Any], bool]] = {
    "scope": lambda value: _is_text(value) and re.fullmatch(r"\*|[^\s:,*]+", value) is not None,
    "cost": lambda value: isinstance(value, int | dict) or callable(value) or _is_key(value),
    "cost_bounds": lambda value: are_bounds(value),
    "api_views": lambda value: isinstance(value, bool),
    "key": lambda value: all(map(_is_key, value)) if isinstance(value, list | tuple) else _is_key(value),
}


#: Says which bounds of costs are valid.
BOUNDS = 'a dict of meters and the lowest and highest cost in each, such as {"tokens": (1, 8_000)}.'


def are_bounds(value: Any) -> bool:
    """Return whether a value is valid as the bounds of the costs that clients choose, by meter."""
    return isinstance(value, dict) and all(
        _is_text(meter)
        and isinstance(bounds, list | tuple)
        and len(bounds) == 2
        and all(map(_is_whole(0, MAX_COST), bounds))
        and bounds[0] <= bounds[1]
        for meter, bounds in value.items()
    )


def _is_key(value: Any) -> bool:
    return callable(value) or (isinstance(value, str) and _KEY.fullmatch(value) is not None)


def _has_bounds(options: dict[str, Any]) -> bool:
    """Return whether each cost that a client chooses has bounds. Such a cost is a place in the request."""
    cost, bounds = options.get("cost"), options.get("cost_bounds", {})
    costs = cost if isinstance(cost, dict) else {"requests": cost}
    return all(_is_key(place) and meter in bounds for meter, place in costs.items() if isinstance(place, str))


def _are_paths(value: Any) -> bool:
    all_options = value.values() if isinstance(value, dict) else ()
    return (
        isinstance(value, list | tuple | dict)
        and all(isinstance(path, str) and path.startswith("/") for path in value)
        and all(isinstance(options, dict) and options.keys() <= _PATH_OPTIONS.keys() for options in all_options)
        and all(_PATH_OPTIONS[name](option) for options in all_options for name, option in options.items())
        and all(map(_has_bounds, all_options))
    )


_PATHS = SettingRule(
    'a list of path prefixes that start with a slash, such as ["/files/"]; or a dict of prefixes and their options,'
    ' such as {"/files/": {"scope": "files", "cost": 2, "key": "header:X-Tenant"}}. A cost that the client chooses,'
    ' such as "field:size", needs cost_bounds, such as {"requests": (1, 100)}.',
    _are_paths,
)


def _is_proxy(value: Any) -> bool:
    """Return whether a value names proxies. The network of all addresses is not valid: it would trust every client."""
    return isinstance(value, str) and (value == UNIX or ip_network(value, strict=False).prefixlen > 0)


_PROXIES = SettingRule(
    'a list of networks, such as ["10.0.0.0/8", "2001:db8::/32"], but no network with /0. Write "unix" for proxies at a'
    " unix socket, and [] for no proxies.",
    lambda value: isinstance(value, list | tuple) and all(map(_is_proxy, value)),
)
_SCOPES = SettingRule(
    'a list of scopes, such as ["mailer-api"].',
    lambda value: isinstance(value, list | tuple) and all(_is_text(scope) and scope for scope in value),
)
_METERS = SettingRule(
    f'a list of at most {MOST_METERS:_} names of meters, such as ["requests", "tokens"]; or None. A name has 1 to'
    f" {LONGEST_UNIT} letters from a to z, digits, '-' and '_'.",
    lambda value: (
        value is None or (isinstance(value, list | tuple) and len(value) <= MOST_METERS and all(map(_is_meter, value)))
    ),
)
_UNITS = SettingRule(
    f'a dict of meters and their units of 1 to {LONGEST_UNIT} characters, such as {{"traffic": "MB"}}.',
    lambda value: (
        isinstance(value, dict)
        and all(_is_meter(meter) and _is_text(unit) and 0 < len(unit) <= LONGEST_UNIT for meter, unit in value.items())
    ),
)
_THRESHOLDS = SettingRule(
    "a list of whole percentages from 1 to 10000, such as [50, 80, 100]; [] for none.",
    lambda value: isinstance(value, list | tuple) and all(map(_is_whole(1, 10_000), value)),
)

#: The kinds of billing systems, by name. The value says whether this kind needs the option KEY.
PUSH_FORMATS = {"stripe": True, "lago": True, "openmeter": False}
#: The options of a billing system, each with a function that returns whether a value is valid. SINCE is a month such as
#: "2026-11". URL contains only visible ASCII characters, but no "?" and no "@".
_PUSH_OPTIONS: dict[str, Callable[[Any], bool]] = {
    "FORMAT": lambda value: isinstance(value, str),
    "KEY": lambda value: _is_text(value) and value.isascii(),
    "SINCE": lambda value: isinstance(value, str) and re.fullmatch(r"[0-9]{4}-(0[1-9]|1[0-2])", value) is not None,
    "URL": lambda value: _is_text(value) and re.fullmatch(r"https?://[!->A-~]+", value) is not None,
    "CUSTOMER": _is_callable,
    "REMEMBERS": lambda value: value is None or (_is_number(value) and 0 <= value <= LONGEST),
}


def _is_receiver(name: Any, options: Any) -> bool:
    """Return whether a name and options of a billing system are valid."""
    if not (isinstance(name, str) and _NAMESPACE.fullmatch(name) and isinstance(options, dict)):
        return False
    kind = options.get("FORMAT", name)
    return (
        options.keys() <= _PUSH_OPTIONS.keys()
        and "SINCE" in options
        and kind in list(PUSH_FORMATS)  # a list, because a dict would raise an error for an unhashable FORMAT
        and bool(options.get("KEY") or not PUSH_FORMATS[kind])
        and all(_PUSH_OPTIONS[option](value) for option, value in options.items())
    )


_PUSH = SettingRule(
    'a dict of billing systems and their options, such as {"stripe": {"KEY": "sk_live_…", "SINCE": "2026-11"}}. A name'
    ' has 1 to 40 letters of ASCII, digits, "_", "." or "-". SINCE is required: no report of an earlier month is'
    ' pushed. KEY is required, except for OpenMeter. FORMAT is "stripe", "lago" or "openmeter". If the name is none of'
    " these words, FORMAT is required. URL (http or https), CUSTOMER (a callable, or its dotted path) and REMEMBERS"
    " are optional. REMEMBERS is the number of hours for which the system recognises an event that it has already"
    " received; None means for ever.",
    lambda value: isinstance(value, dict) and all(_is_receiver(name, options) for name, options in value.items()),
)

RULES: dict[str, SettingRule] = {
    "ENABLED": _FLAG,
    "EMBEDDED": SettingRule(
        "True, False, None, or the path of a folder, such as '/var/lib/shop/valkey'.",
        lambda value: value is None or isinstance(value, bool) or _is_text(value),
    ),
    "CACHE_ALIAS": SettingRule("the name of an alias in CACHES.", lambda value: isinstance(value, str) and value != ""),
    "NAMESPACE": SettingRule(
        "1 to 40 letters of ASCII, digits, '_', '.' or '-'; braces would break the hash tags of a cluster.",
        lambda value: isinstance(value, str) and _NAMESPACE.fullmatch(value) is not None,
    ),
    "SHARDS": SettingRule("a whole number from 1 to 16384, the number of slots of a cluster.", _is_whole(1, 16_384)),
    "DATABASE": SettingRule(
        "the name of an alias in DATABASES.", lambda value: isinstance(value, str) and value in settings.DATABASES
    ),
    "USER": _HOOK,
    "API_KEY": _HOOK,
    "ACCOUNT": _HOOK,
    "ACCOUNT_MODEL": SettingRule(
        'the model of an installed app, such as "shop.Tenant", or None.',
        lambda value: value is None or (isinstance(value, str) and _is_model(value)),
    ),
    "ONE_ACCOUNT_PER_KEY": _FLAG,
    "NUM_PROXIES": SettingRule(
        "a whole number from 0 to 100, or None.", lambda value: value is None or _is_whole(0, 100)(value)
    ),
    "TRUSTED_PROXIES": _PROXIES,
    "ADDRESS_HEADER": SettingRule(
        'the name of a header that has addresses, such as "X-Real-IP". The app cannot read the header Forwarded.',
        lambda value: isinstance(value, str) and _HEADER.fullmatch(value) is not None and value.lower() != "forwarded",
    ),
    "KEY_SEARCH": _CALLABLE,
    "TIMEOUT": _seconds(LONGEST_CALL),
    "MEMORY_BUDGET": _BUDGET,
    "FAILURE_POLICY": _one_of("allow", "deny"),
    "RELOAD_INTERVAL": _seconds(),
    "DENY_CACHE_SECONDS": _seconds(may_be_zero=True),
    "PREFETCH_SECONDS": _seconds(may_be_zero=True),
    "RECEIPT_TTL": _seconds(),
    "METERS": _METERS,
    "OUTBOUND_SCOPES": _SCOPES,
    "PATHS": _PATHS,
    "REFUSAL_RESPONSE": _CALLABLE,
    "BILL_ERRORS": _FLAG,
    "MAX_WAITING": SettingRule("a whole number from 0 to 1_000_000.", _is_whole(0, 1_000_000)),
    "X_RATELIMIT_HEADERS": _FLAG,
    "X_RATELIMIT_RESET": _one_of("seconds", "epoch"),
    "SHADOW_HEADERS": _FLAG,
    "TELEMETRY": SettingRule(
        'a list of "prometheus" and "opentelemetry"; [] for neither.',
        lambda value: (
            isinstance(value, list | tuple) and all(name in ("prometheus", "opentelemetry") for name in value)
        ),
    ),
    "RECORD_SAMPLE": SettingRule("a number from 0 to 1.", lambda value: _is_number(value) and 0 <= value <= 1),
    "RECORD_SECONDS": _seconds(),
    "RECORD_ROWS": SettingRule("a whole number from 1 to 1_000_000_000.", _is_whole(1, 1_000_000_000)),
    "UNITS": _UNITS,
    "SEAL_INTERVAL": _seconds(),
    "FENCE": _one_of("aof", "waitaof", "wait", "window", "durable", "none"),
    "FENCE_REPLICAS": SettingRule("a whole number from 1 to 100.", _is_whole(1, 100)),
    "FENCE_WINDOW": _seconds(LONGEST_WINDOW),
    "DRAIN_INTERVAL": _seconds(),
    "COMPACT_INTERVAL": _seconds(),
    "FINALISE_INTERVAL": _seconds(),
    "GRACE_SECONDS": SettingRule(f"a whole number of seconds from 0 to {LONGEST:_}.", _is_whole(0, LONGEST)),
    "PRORATION": _one_of("none", "time"),
    "LATE_USAGE": _one_of("version", "period"),
    "ADJUSTMENT_APPROVAL": _FLAG,
    "PROCESS_TOTALS_INTERVAL": _seconds(may_be_zero=True),
    "SIGNING_KEY": SettingRule("a text; an empty text means no signatures.", _is_text),
    "SIGNING_KEYS_OLD": SettingRule(
        'a list of the former keys, as texts. Add "" to the list if SIGNING_KEY was empty at first. Write [] if there'
        " are no former keys.",
        lambda value: isinstance(value, list | tuple) and all(map(_is_text, value)),
    ),
    "BILLING_CUSTOMER": _CALLABLE,
    "PUSH": _PUSH,
    "PUSH_INTERVAL": _seconds(),
    "PUSH_TIMEOUT": _seconds(LONGEST_POST),
    "ALERT_THRESHOLDS": _THRESHOLDS,
    "ALERT_INTERVAL": _seconds(),
    "ALERT_TIMEOUT": _seconds(LONGEST_POST),
    "ALERT_PUBLIC_ONLY": _FLAG,
}


def complaint(name: str, value: Any) -> str:
    """Return a sentence that says which values are valid; "" if this value is valid."""
    rule = RULES[name]
    try:
        return "" if rule.is_valid(value) else f"Write {rule.hint}"
    except ImportError as error:
        return f"It cannot be imported: {error}. Write {rule.hint}"
    except (TypeError, ValueError) as error:
        return f"It is not valid: {error}. Write {rule.hint}"
    except Exception as error:  # noqa: BLE001  (a module that is imported can raise any error)
        return f"It cannot be imported: {type(error).__name__}: {error}. Write {rule.hint}"


def wrong_entry(name: str, value: Any) -> tuple[Any, Any] | None:
    """Return the first entry of a list or dict that is wrong, as (its index or key, the entry).

    Return None if the value is no list and no dict, or if each entry alone would be valid.
    """
    if isinstance(value, dict):
        entries = [(key, {key: entry}) for key, entry in value.items()]
    elif isinstance(value, list | tuple):
        entries = [(index, [entry]) for index, entry in enumerate(value)]  # type: ignore[misc]
    else:
        return None
    if complaint(name, type(value)()):
        return None  # The setting needs another type.
    return next(((place, value[place]) for place, alone in entries if complaint(name, alone)), None)
