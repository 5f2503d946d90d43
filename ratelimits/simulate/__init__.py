"""What a rule would have done to traffic: traces replayed on the real scripts, with a virtual clock."""

from __future__ import annotations

from ratelimits.simulate.lines import BadLine, Line, Reader, Rules, decoded, objects, read_rules
from ratelimits.simulate.replay import Outcome, Replay, Simulator, sandbox
from ratelimits.simulate.summary import Summary

__all__ = [
    "BadLine",
    "Line",
    "Outcome",
    "Reader",
    "Replay",
    "Rules",
    "Simulator",
    "Summary",
    "decoded",
    "objects",
    "read_rules",
    "sandbox",
]
