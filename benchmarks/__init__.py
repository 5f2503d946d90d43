"""Benchmarks: commands such as `python -m benchmarks.decide`. docs/performance.md lists all commands.

Each benchmark starts its own servers and prints a table. With `--out DIR` it also writes the results as JSON.
`python -m benchmarks.document DIR` copies these results into the tables of docs/performance.md.
"""
