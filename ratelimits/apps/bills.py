"""Installs the floor that bills."""

from __future__ import annotations

from ratelimits import erasure
from ratelimits.reports import installing
from ratelimits.status import additions, billed


def install() -> None:
    """Put the functions of this floor in the places that the floors below leave for them."""
    erasure.PARTS.add("ratelimits.erasure.bills.BILLS")
    additions.register(billed.ADDITIONS)
    installing.install()
