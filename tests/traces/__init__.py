"""Traces: published cases, named traps, seeded random traffic and hypothesis strategies.

Everything here works with any Replay interface: `open_replay(rule)` returns an object whose
`step(line)` answers one line of a trace.
"""
