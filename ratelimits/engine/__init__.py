"""The engine: limits in, one atomic decision out. It knows Redis, and nothing of models, DRF or requests."""
