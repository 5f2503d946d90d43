"""Traces, which are lists of requests with their times: published cases, traps, and random traffic.

A test replays a trace with the model or with the real scripts: `open_replay(rule)` returns an object whose `step(line)`
answers one line of the trace.
"""
