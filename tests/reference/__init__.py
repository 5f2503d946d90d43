"""What every algorithm must answer, worked out from its definition with exact rational numbers.

The model is written from DESIGN and CONTRACT alone, so that it can judge the scripts. Nothing is rounded but what
the definitions round: `wait`, `retry_after` and `reset_after` up to a microsecond when they are told, and Guava's
own truncations. States are immutable values and every limit is a set of functions of a state and a moment, so a
peek is the same computation as a request whose outcome is thrown away.

Where the contract leaves a choice open, the model decides, and the engine must decide the same:

Time
- Each limit of a key keeps the newest moment at which it came into being, was charged, or had its rule changed. A
  decision is made as at the newest of them that lies at most 60 s ahead; a limit that lies further ahead jumps back
  to the moment that is decided as at. Single-rule keys have one newest moment, and lists differ in theirs only after
  a birth of some.
- A refund or a release takes effect as at its own (clamped) moment and leaves the newest moment where it was: what
  has ended, expired or drained in between is there again for a clock that steps back. Only a level or a queue that
  was given back all it owed owes nothing any more, whatever the clock does.
- A request exactly 60 s before the newest moment is still clamped to it; one microsecond more is a jump.
- A jump moves the newest moment to the one decided as at and every stored time back by the same difference. What is
  aligned to a clock (epoch and calendar windows, buckets of a sliding window) keeps its distance in whole windows
  or buckets from the newest moment: a count that was current then is current now.
- Every line but a peek and a request of cost 0 stores the jump, a request that can never pass included.
- `retry_after`, `reset_after` and `wait` count from the moment the decision is made as at.
- `at` and `timeout` are read to the nearest microsecond, halves up.

Birth
- A request that can never pass under one of its limits brings none into being, and neither do cost 0, `peek`,
  `refund`, `release` and `set_rule`. `create` of what exists already changes nothing.
- A limit that started afresh (its algorithm changed) is born like a new key's, at the key's next request.

Answers
- `limit`: when refused, that of the refusing limit with the greatest `retry_after` (never counts as greatest, the
  first one on ties); when allowed, that of the limit with the least `remaining` (the first one on ties).
- `wait` is 0 when refused. A key that was never seen answers a peek as if it were born now.

Refunds
- Windows give back from the current window only; `sliding_window` from its newest live bucket first (the partly
  expired one of a weighted window is its last); `sliding_log` from its newest live entries first.
- Levels and the queue give back at most what is spent or ahead now. `smooth_*`: `next` moves back by
  trunc(cost * stable), never before now; stored permits are left alone.
- `concurrency`: from the live records of the lease named (default ""), newest first.
- A `first_hit` window that was refunded to nothing stays open until it ends.

Leases
- Each acquire is a record of its own; `release` ends all live records of that name.

Changed rule
- It takes effect for every key at the line's `at`, clamped (or jumped) per key; the newest moment of what is kept
  is then that moment. A list replaces a list of the same length, position by position.
- Another algorithm starts afresh. A level keeps what is spent; the queue what is ahead, in permits.
- `fixed_window`: a count whose window is still open moves into the window current under the new rule; `first_hit`
  keeps the old window's start if that is still open under the new period, else the window opens at the change. A
  window without a count is none under another period or start; an epoch window whose clock jumps in the same line
  keeps its distance in time.
- `calendar_window`: a count whose period is current moves into the period current under the new rule.
- `sliding_window`: the count of each live bucket moves to the new bucket that contains the old bucket's start,
  clamped into the newest N; the bucket that is just leaving is live if the new rule is weighted. Nothing moves when
  neither the buckets' width nor their number changes.
- `sliding_log`: entries keep their moments; what had expired under the old period does not come back.
- `smooth_*`: brought up to date under the old rule, then stored * (new max / old max).
- `concurrency`: a new `lease_ttl` is for new leases.

Calendars
- A wall clock that a change of offset skips is read with the offset before it (02:30 becomes 03:30); one that comes
  twice is its first.
- An hour without an anchor starts at the full hours of the wall clock; where an offset changes by a part of an
  hour, the change ends the hour. With an anchor, hours are counted from the anchor's moment.
"""

from __future__ import annotations

from tests.reference.replay import Replay

__all__ = ["Replay"]
