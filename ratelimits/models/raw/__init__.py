"""Give a version and a history to rows that were written without the `save` of the app's models."""

from __future__ import annotations
