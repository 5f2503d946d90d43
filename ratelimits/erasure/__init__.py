"""Erasing a customer: replace its names everywhere by pseudonyms, and keep every sum, chain, digest and signature."""
