"""Traces: published cases, named traps, seeded random traffic and hypothesis strategies.

Everything here plays on anything with the Replay interface: `open_replay(rule)` gives an object whose
`step(line)` answers one line of a trace.
"""
