"""Benchmarks. Each module is a command, such as `python -m benchmarks.decide`. docs/performance.md lists them.

Each command starts its own servers, pins all processes to cores, and prints a table. With `--out DIR` it also writes
the results as JSON. `python -m benchmarks.document DIR` copies them into the tables of docs/performance.md.
"""
