"""Signals that a project can connect to."""

from __future__ import annotations

from django.dispatch import Signal

#: Sent in a worker when an account's usage has reached a threshold. `sender` is the model `Alert`, and `alert` is its
#: row. The signal is sent again until all receivers have returned without an exception. By `alert.pk`, a receiver can
#: recognise an alert that it has received before.
threshold_reached = Signal()

# An exception in a receiver of the following signals is logged, and changes nothing.

#: Sent for each refused request, also if the refusal is repeated from memory. `answer` is the Answer. `identity` says
#: who made the request; it is None for throttle classes with rates in code. `scope` and `method` say what was
#: requested. Receivers run within the request: keep them short. In async code, async receivers are awaited.
request_refused = Signal()

#: Sent in the process that made an edit, after the commit and after the attempt to tell Redis the new version.
#: `version` is the version of the configuration, and `using` is the alias of its database.
rules_changed = Signal()

#: Sent in the process that finalised a report (a worker, a command or the admin), after the commit. `sender` is the
#: model `Report`, and `report` is its row.
period_closed = Signal()

#: Sent when this process stops asking Redis, because several calls in a row have failed (`is_open` is True), and when
#: Redis has answered again (`is_open` is False).
breaker_switched = Signal()
