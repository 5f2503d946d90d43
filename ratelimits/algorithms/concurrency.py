"""The algorithm that limits how many requests run at once. Each request has a lease until the request ends."""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Decimal

from ratelimits.algorithms.base import Bounded, Params, Storage
from ratelimits.algorithms.parsing import length, micros
from ratelimits.algorithms.wording import Wording, amount, gettext_noop


@dataclass(frozen=True, slots=True)
class Concurrency(Bounded):
    """At most `capacity` requests run at once.

    The lease of a request ends with the request. If the request takes longer than `lease_ttl` seconds, its lease ends
    after this time.
    """

    id = "concurrency"
    label = gettext_noop("concurrency")
    explanation = gettext_noop(
        "Limits how many requests run at the same moment. A request gives its place back when it ends."
    )
    code = 11
    script = "concurrency"
    # lua/algorithms/concurrency.lua describes these Redis keys.
    storage = Storage(
        own="c",
        endings={"details": ":x"},
        optional={"announced": ":a", "freed": ":f"},
    )
    leases = True
    #: A lease can be released at any moment, so a process must not repeat a refusal from memory.
    refusals_stand = False
    lease_ttl: Decimal = Decimal(60)

    def _check(self) -> None:
        Bounded._check(self)
        self._set("lease_ttl", length("lease_ttl", self.lease_ttl))

    def sentence(self, words: Wording, unit: str) -> list[str]:
        _ = words.gettext
        return [
            _("%(amount)s at once") % {"amount": amount(self.capacity, unit)},
            _("each for up to %(span)s") % {"span": words.span(self.lease_ttl)},
        ]

    def params(self, now: int) -> Params:
        return micros(self.lease_ttl), 0, 0, 0, 0, self.capacity

    def record_form(self, params: Params) -> str:
        return "leases"
