"""Customers and their names: which account texts a customer has, and since when."""

from __future__ import annotations
