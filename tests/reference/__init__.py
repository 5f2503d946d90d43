"""A model of every algorithm, in exact rational numbers: tests compare the answers of the engine with its answers.

The model was written only from the definitions of the algorithms (docs/algorithms.md), not from the engine's scripts.
It rounds only where the definitions round: `wait`, `retry_after` and `reset_after` are rounded up to a microsecond, and
Guava's formulas truncate. States are immutable values, and a limit is a set of functions of a state and a moment. So a
peek is the same computation as a request, but its new state is not stored.

Where the definitions leave a choice open, the model makes one, and the engine must make the same:

Time
- Each limit of a key stores its newest moment: when it was last created, charged, or given another rule. A decision is
  made at the latest of these moments: the clock, and the newest moments that are at most 60 s ahead of the clock. A
  limit that is further ahead jumps back to the moment of the decision. A key of a single rule has one newest moment. In
  a list of rules, the newest moments differ only if some limits were created later than others.
- A refund or a release takes effect at its own (clamped) moment and does not change the newest moment. So if the clock
  steps back, permits that ended, expired or drained meanwhile count again. There is one exception: a level or a queue
  that was refunded completely owes nothing, whatever the clock does.
- A request exactly 60 s before the newest moment is still clamped to it; one microsecond more is a jump.
- A jump moves the newest moment back to the moment of the decision, and every stored time back by the same
  difference. Times that are aligned to a clock (epoch and calendar windows, buckets of a sliding window) keep their
  distance from the newest moment in whole windows or buckets: a count that was current then is current now.
- Every line stores the jump, except a peek and a request of cost 0. A request that can never pass stores it too.
- `retry_after`, `reset_after` and `wait` count from the moment at which the decision is made.
- `at` and `timeout` are read to the nearest microsecond, halves up.

Creation of a limit's state (called "birth" in the model)
- A request that can never pass under one of its limits creates no state. Neither do cost 0, `peek`, `refund`,
  `release` and `set_rule`. `create` changes nothing if the state exists already.
- A limit whose algorithm changed gets a new state at the key's next request, as for a new key.

Answers
- `limit` of a refusal is the number of the refusing limit with the greatest `retry_after`. "Never" counts as the
  greatest. `limit` of an admission is the number of the limit with the least `remaining`. Of equal limits, the first
  counts.
- `wait` is 0 in a refusal. A key that was never seen answers a peek as if it were created now.

Refunds
- Windows give back only from the current window. `sliding_window` gives back from its newest live bucket first (the
  partly expired bucket of a weighted window is the last), `sliding_log` from its newest live entries first.
- Levels give back at most the permits that are spent now, the queue at most those that are ahead now. For `smooth_*`,
  `next` moves back by trunc(cost * stable), but never before now; stored permits do not change.
- `concurrency` gives back from the live records of the named lease (default ""), the newest first.
- A `first_hit` window whose count was refunded to 0 stays open until it ends.

Leases
- Each acquire makes its own record; `release` ends all live records of that name.

Changed rule
- It takes effect for every key at the line's `at`, clamped (or jumped) per key; the newest moment of the state
  becomes that moment. A list replaces a list of the same length, position by position.
- With another algorithm the limit gets a new state. A level keeps the permits that are spent; the queue keeps the
  permits that are ahead.
- `fixed_window`: a count whose window is still open moves into the current window under the new rule. `first_hit`
  keeps the old window's start if it is still open under the new period; otherwise the window opens at the change. A
  window without a count does not continue under another period or start. If the clock jumps in the same line, an
  epoch window keeps its distance in time.
- `calendar_window`: a count whose period is current moves into the current period under the new rule.
- `sliding_window`: the count of each live bucket moves to the new bucket that contains the old bucket's start,
  clamped into the newest N; the bucket that is just expiring is live if the new rule is weighted. Nothing moves if
  neither the buckets' width nor their number changes.
- `sliding_log`: entries keep their times; an entry that had expired under the old period does not come back.
- `smooth_*`: the state is brought up to date under the old rule, then stored * (new max / old max).
- `concurrency`: a new `lease_ttl` applies to new leases.

Calendars
- A local time that a change of offset skips is read with the offset before the change (02:30 becomes 03:30). Of a
  local time that comes twice, the first one counts.
- Hours without an anchor start at the full hours of local time. If an offset changes by a part of an hour, the change
  ends the hour. With an anchor, hours are counted from the anchor's moment.
- Billing periods are months with the time zone and the anchor of the account. There is no ledger here, so no period
  keeps its start and its end after an edit of these terms.
"""

from __future__ import annotations

from tests.reference.replay import Replay

__all__ = ["Replay"]
