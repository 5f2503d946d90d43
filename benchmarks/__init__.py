"""Benchmarks: each module is a command, `python -m benchmarks.decide` and so on; docs/performance.md says which.

Every command starts servers of its own, pins itself and them to cores, and prints a table; `--out DIR` also writes the
run as JSON, from which `python -m benchmarks.document DIR` fills the tables of docs/performance.md.
"""
