"""The simulator: let the real scripts decide recorded requests (a trace) by a rule, with a virtual clock."""

from __future__ import annotations

from ratelimits.simulate.lines import BadLine, Reader, Rules, TraceLine, decode_json, json_lines, read_rules
from ratelimits.simulate.replay import LineOutcome, Replay, Simulator, sandbox
from ratelimits.simulate.runs import clean
from ratelimits.simulate.summary import Summary

__all__ = [
    "BadLine",
    "LineOutcome",
    "Reader",
    "Replay",
    "Rules",
    "Simulator",
    "Summary",
    "TraceLine",
    "clean",
    "decode_json",
    "json_lines",
    "read_rules",
    "sandbox",
]
