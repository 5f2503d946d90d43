"""Measure the time of single functions within one request.

Each function is wrapped in a function that measures its time. This time excludes the time of other wrapped functions
that it calls. The wrappers take some time too, so the result also has the time of the whole request without wrappers.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable
from functools import wraps
from statistics import median
from typing import Any

#: The functions to wrap, as "module:name". The callers of a function look up its name in this module, so the wrapper is
#: stored there under this name. A name that no longer exists is reported and left out.
FUNCTIONS = (
    "ratelimits.throttling.by_rules:QuotaThrottle.allow_request",
    "ratelimits.throttling.by_rules:costs_of",
    "ratelimits.throttling.by_rules:identify",
    "ratelimits.identity:api_key_of",
    "ratelimits.identity:address_of",
    "ratelimits.addresses:proxies",
    "ratelimits.identity:address_key",
    "ratelimits.throttling.by_rules:check_and_wait",
    "ratelimits.quota.checking:check",
    "ratelimits.quota.checking:valid_costs",
    "ratelimits.quota.checking:commands_by",
    "ratelimits.quota.checking:_answer",
    "ratelimits.quota.checking:Answer.headers",
    "ratelimits.quota.checking:current_server",
    "ratelimits.quota.checking:decide_call",
    "ratelimits.rules:current",
    "ratelimits.quota.deny_cache:DenyCache.repeat",
    "ratelimits.engine.decide:new_nonce",
    "ratelimits.engine.decide:parse_reply",
    "ratelimits.engine.decide:Decision.__init__",
    "ratelimits.engine.command:Command.to_bytes",
    "ratelimits.engine.transport.wire:Wire.call",
    "ratelimits.engine.transport.wire:Wire._take",
    "ratelimits.engine.transport.wire:exchange",
    "redis.connection:Connection.send_packed_command",
    "redis.connection:Connection.read_response",
)
#: Approximate time of a wrapper, in ns.
_WRAPPER_NS = 130


class Watch:
    """Wraps functions, and stores the time of each call in ns.

    own      function -> the time of each call, without the time of other wrapped functions that the call runs
    missing  the functions that no longer exist
    """

    def __init__(self) -> None:
        self.own: dict[str, list[int]] = {}
        self.missing: list[str] = []
        #: One number for each wrapped call that is running, the outermost call first: how many ns this call has waited
        #: for other wrapped calls.
        self._inner: list[int] = []
        #: What must be restored: the module or class, the name in it, and the original function.
        self._undo: list[tuple[Any, str, Any]] = []

    def __enter__(self) -> Watch:
        for name in FUNCTIONS:
            module, _colon, path = name.partition(":")
            *places, last = path.split(".")
            holder: Any = importlib.import_module(module)
            for place in places:
                holder = getattr(holder, place, None)
            function = getattr(holder, last, None)
            if function is None:
                self.missing.append(name)
                continue
            self._undo.append((holder, last, function))
            setattr(holder, last, self._wrapped(name, function))
        return self

    def __exit__(self, *about: object) -> None:
        for holder, last, function in self._undo:
            setattr(holder, last, function)

    def _wrapped(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        own, inner, clock = self.own.setdefault(name, []), self._inner, time.perf_counter_ns

        @wraps(function)
        def watched(*args: Any, **kwargs: Any) -> Any:
            start = clock()
            inner.append(0)
            try:
                return function(*args, **kwargs)
            finally:
                elapsed = clock() - start
                own.append(elapsed - inner.pop())
                if inner:
                    inner[-1] += elapsed + _WRAPPER_NS

        return watched


def watch(call: Callable[[], object], calls: int) -> dict[str, Any]:
    """Return the functions' own times in µs, and the whole time of a request in µs with and without wrappers.

    The function that takes the most time of a request comes first.
    """

    def whole() -> float:
        """Return the median time of a request in µs."""
        times = []
        for _ in range(calls):
            start = time.perf_counter_ns()
            call()
            times.append(time.perf_counter_ns() - start)
        return median(times) / 1000

    alone = whole()
    with Watch() as watching:
        wrapped = whole()
    functions: list[dict[str, Any]] = [
        {
            "function": name.replace(":", "."),
            "calls": round(len(times) / calls, 2),
            "own_us": round(median(times) / 1000, 3),
            "low_us": round(sorted(times)[len(times) // 10] / 1000, 3),  # the 10th percentile
        }
        for name, times in watching.own.items()
        if times
    ]
    functions.sort(key=lambda one: -one["calls"] * one["own_us"])
    return {
        "whole_us": round(alone, 3),
        "wrapped_us": round(wrapped, 3),
        "functions": functions,
        "missing": watching.missing,
    }
