"""For each trap: the line of the scripts that avoids it, and the text with which a test replaces this line.

A trap is a fault of other rate limiters (see tests/traces/traps.py). With the replaced line, the trap must show.
"""

from __future__ import annotations

from tests.traces.traps import AHEAD, BACK, NEVER, Trap

#: A file of ratelimits/lua, a text in it, and its replacement.
Edit = tuple[str, str, str]
#: Switch the fast path off.
NO_FAST_PATH: Edit = ("fast", "if ARGV[5] ~= '' then", "if false then")

LIVES = "entry[3] = math.min(math.ceil((at + math.max(life, CLOCK_BACK)) / 1e6) + 1, 4294967295)"
DRAIN = "    shrink_debt(l, l.now - from)\n  end"
OWES, BEHIND = "    l.T, l.g = T, g", "\n  end\n\n  function level.refund"
BORN = "last, l.must_write = at, not never and l.retry ~= NEVER"
ADMITS = "if allowed and l.ok and l.cost > 0 then"
NEWEST = "if readable and l.entry[4] > at and l.entry[4] <= now + CLOCK_BACK then at = l.entry[4] end"
IMPOSSIBLE = "if l.cost > capacity then l.retry = NEVER return end"

#: Write only fourteen digits of a number.
_level_digits = ("level", "struct.pack(FRACTION, entry[4]", "struct.pack(FRACTION, tonumber(tostring(entry[4]))")
_window_digits = ("window", "unpack(entry, 4, 7)", "entry[4], tonumber(tostring(entry[5])), entry[6], entry[7]")
_log_digits = ("sliding_log", "last, l.params[1], l.base,", "last, l.params[1], tonumber(tostring(l.base)),")
#: A time to live that rounds to 0, and one that ignores the debt.
_no_life = ("decide", LIVES, "entry[3] = math.floor((at + life) / 1e6)")
_short_life = ("decide", LIVES, "entry[3] = math.ceil((at + CLOCK_BACK) / 1e6) + 1")
#: Refill only whole permits, only at whole seconds, or truncated.
_floored = ("level", DRAIN, DRAIN.replace("l.now - from", "math.floor((l.now - from) / params[1]) * params[1]"))
_seconds = (
    "level",
    DRAIN,
    DRAIN.replace("l.now - from", "math.floor(l.now / 1e6) * 1e6 - math.floor(from / 1e6) * 1e6"),
)
_cut = ("level", f"{OWES}{BEHIND}", f"    l.T = T{BEHIND}")
_denied = ("decide", ADMITS, "if l.cost > 0 and l.retry ~= NEVER then")
_sibling = ("decide", ADMITS, "if l.ok and l.cost > 0 then")
_unborn = ("decide", BORN, "last, l.must_write = at, false")
_born = ("decide", BORN, "last, l.must_write = at, true")
_forgets = ("decide", "if entry and op ~= RESET then", "if entry and op ~= RESET and op ~= CHANGE then")
_same_rate = ("level", "      l.T, l.g, l.m = stretch(l, entry)\n", "")
_clamp = ("decide", NEWEST, "")
_jump = ("decide", NEWEST, NEWEST.replace(" and l.entry[4] <= now + CLOCK_BACK", ""))
_put_right = ("decide", "if last > at then l.shift, last = last - at, at end", "")

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
    "level": ("level", "if cost > max_cost(l) then l.retry = NEVER return end", ""),
    "window": ("window", "if l.cost > capacity then\n      l.retry = NEVER\n    elseif", "if"),
    "sliding_window": ("sliding_window", IMPOSSIBLE, ""),
    "sliding_log": ("sliding_log", IMPOSSIBLE, ""),
    "concurrency": ("concurrency", IMPOSSIBLE, ""),
}


def guarded_by(trap: Trap, script: str) -> Edit:
    """Return the edit of the scripts with which a trap shows; `script` is the file of the rule's algorithm."""
    return _BY_NAME.get(trap.name) or {BACK: _clamp, AHEAD: _jump, NEVER: _NEVER.get(script, _clamp)}[trap.source]
