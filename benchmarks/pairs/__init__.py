"""Benchmarks that compare two ways in the same rounds."""
