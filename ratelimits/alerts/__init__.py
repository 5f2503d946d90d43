"""Alerts for accounts that reach a threshold of their quota. They are sent by signal, e-mail and webhook."""

from __future__ import annotations
