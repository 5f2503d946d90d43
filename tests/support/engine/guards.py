"""For each trap: the line of the scripts that avoids it, and the text with which a test replaces this line.

A trap is a fault of other rate limiters (see tests/traces/traps.py). With the replaced line, the trap must show.
"""

from __future__ import annotations

from tests.traces.traps import AHEAD, BACK, NEVER, Trap

#: A file of ratelimits/lua, a text in it, and its replacement.
Edit = tuple[str, str, str]

LIVES = "  local needed_until = at + (l.life > CLOCK_BACK and l.life or CLOCK_BACK)\n"
EXPIRY = "(needed_until % 1e6 > 0 and 2 or 1)"
DRAIN = "  local elapsed = at - from\n  if"
OWES = "  l.T, l.g = T, g\n"
BORN = "l.written = not never and l.retry ~= NEVER"
ADMITS = "  if allowed and l.ok then\n--: do charge"
NEWEST = "if l.last and l.last > at and l.last <= now + CLOCK_BACK then at = l.last end"
IMPOSSIBLE = "if l.cost > l.capacity then"

#: Write only fourteen digits of a number.
_level_digits = ("level", "  local from = l.last\n", "  local from = tonumber(tostring(l.last))\n")
_window_digits = (
    "window",
    "l.start, l.length, l.count = l.stored_start, l.stored_length",
    "l.start, l.length, l.count = tonumber(tostring(l.stored_start)), l.stored_length",
)
_log_digits = ("sliding_log", "= l.base - l.shift, l.expiry", "= tonumber(tostring(l.base - l.shift)), l.expiry")
#: A time to live that rounds to 0, and one that ignores the debt.
_no_life = ("decide", LIVES + "  needed_until = (needed_until - needed_until % 1e6) / 1e6 + " + EXPIRY,
            "  local needed_until = math.floor((at + l.life) / 1e6)")  # fmt: skip
_short_life = ("decide", LIVES, "  local needed_until = at + CLOCK_BACK\n")
#: Refill only whole permits, only at whole seconds, or truncated.
_floored = ("level", DRAIN, DRAIN.replace("at - from", "math.floor((at - from) / l.q) * l.q"))
_seconds = ("level", DRAIN, DRAIN.replace("at - from", "math.floor(at / 1e6) * 1e6 - math.floor(from / 1e6) * 1e6"))
_cut = ("level", OWES, "  l.T = T\n")
_denied = ("decide", ADMITS, ADMITS.replace("allowed and l.ok", "l.retry ~= NEVER"))
_sibling = ("decide", ADMITS, ADMITS.replace("allowed and l.ok", "l.ok"))
_unborn = ("decide", BORN, "l.written = false")
_born = ("decide", BORN, "l.written = true")
_forgets = ("decide", "if l.last then l.written = true end\n", "--: do initial\nl.written = true\n")
_same_rate = (
    "level",
    "    l.T, l.g, l.m = rarely().stretch(l.T, l.g, l.m, l.stored_q, l.stored_r, l.stored_n, l.q, l.r, l.n)\n",
    "",
)
_clamp = ("decide", NEWEST, "")
_jump = ("decide", NEWEST, NEWEST.replace(" and l.last <= now + CLOCK_BACK", ""))
_put_right = ("decide", "if l.last > at then l.shift, l.last = l.last - at, at end", "")

_BY_NAME: dict[str, Edit] = {
    "a moment of sixteen digits keeps its last": _level_digits,
    "a window's start keeps its last digit": _window_digits,
    "a log's entry keeps its last digit": _log_digits,
    "100 a second, 10 at once: 10 of 50": _no_life,
    "rate above twice the capacity": _no_life,
    "a debt of many periods is still owed": _short_life,
    "0.9 a second for 30 seconds: 28 of 30": _floored,
    "a poller at a fixed pace passes as soon as it may": _denied,
    "what a sibling refuses costs nothing": _sibling,
    "three in seven seconds, to the microsecond": _cut,
    "a million in thirty days, to the microsecond": _seconds,
    "an empty bucket fills from its first, refused request": _unborn,
    "a request that can never pass brings no bucket into being": _born,
    "a lower capacity keeps what was spent": _forgets,
    "time that a swinging clock counts twice is counted once": _clamp,
    "another rate keeps what was spent, in permits": _same_rate,
    "a higher capacity adds only the difference": _forgets,
    "a refusal remembers that the clock was put right": _put_right,
}
_NEVER = {
    "level": (
        "level",
        "if l.cost > (l.code == 4 and l.capacity > 0 and l.capacity + 1 or l.capacity) then",
        "if false then",
    ),
    "window": ("window", IMPOSSIBLE, "if false then"),
    "sliding_window": ("sliding_window", IMPOSSIBLE, "if false then"),
    "sliding_log": ("sliding_log", IMPOSSIBLE, "if false then"),
    "concurrency": ("concurrency", IMPOSSIBLE, "if false then"),
}


def guarded_by(trap: Trap, script: str) -> Edit:
    """Return the edit of the scripts with which a trap shows; `script` is the file of the rule's algorithm."""
    return _BY_NAME.get(trap.name) or {BACK: _clamp, AHEAD: _jump, NEVER: _NEVER.get(script, _clamp)}[trap.source]
