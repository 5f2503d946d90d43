"""Names of the steps from sealing to pushing. Tests end a process at each step, to show that no usage is lost.

At each step, the code calls `reached` with the step's name. The function does nothing, but tests replace it.
"""

from __future__ import annotations

from collections.abc import Callable

#: The steps of sealing, draining, tallying and compacting, in this order.
STEPS = (
    "seal:before",
    "seal:after",
    "drain:listed",
    "drain:fenced",
    "drain:read",
    "drain:locked",
    "drain:batch-written",
    "drain:lines-written",
    "drain:state-written",
    "drain:committed",
    "drain:dropped",
    "drain:watermark-locked",
    "drain:watermark-written",
    "tally:locked",
    "tally:periods-frozen",
    "tally:periods-added",
    "tally:added",
    "tally:committed",
    "compact:locked",
    "compact:deleted",
    "compact:written",
    "compact:committed",
)
#: Those of tallying alone.
TALLY_STEPS = tuple(step for step in STEPS if step.startswith("tally:"))
#: The steps of closing a billing period.
CLOSE_STEPS = (
    "close:locked",
    "close:report-written",
    "close:lines-written",
    "close:adjustments-marked",
    "close:marked",
    "close:committed",
)
#: The steps of giving an account text to another customer.
MOVE_STEPS = (
    "move:locked",
    "move:named",
    "move:counted",
    "move:adjusted",
    "move:committed",
)
#: The steps of erasing a customer.
ERASE_STEPS = (
    "erase:archives-written",
    "erase:lines-written",
    "erase:reports-written",
    "erase:configuration-written",
    "erase:totals-written",
    "erase:salt-deleted",
    "erase:committed",
    "erase:files-deleted",
)
#: The steps of pushing report lines to a billing system.
PUSH_STEPS = (
    "push:locked",
    "push:lines-planned",
    "push:planned",
    "push:plan-committed",
    "push:claimed",
    "push:connected",
    "push:answered",
    "push:receiver-written",
    "push:outcome-written",
    "push:marked",
    "push:held",
)


def _do_nothing(step: str) -> None:
    return


#: Called with the name of a step. Tests replace this function.
reached: Callable[[str], None] = _do_nothing
