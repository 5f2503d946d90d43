"""Signals that a project can connect to."""

from __future__ import annotations

from django.dispatch import Signal

#: Sent in a worker when an account's usage has reached a threshold. `sender` is the model Alert, `alert` the row, which
#: says of whom, of what, how much and in which period. Sent again until every receiver has returned without an
#: exception: a receiver that must act once recognises a repetition by `alert.pk`.
threshold_reached = Signal()
