"""Signals that a project can connect to."""

from __future__ import annotations

from django.dispatch import Signal

#: Sent in a worker when an account's usage has reached a threshold. `sender` is the model `Alert`, and `alert` is its
#: row. The signal is sent again until all receivers have returned without an exception. By `alert.pk`, a receiver can
#: recognise an alert that it has received before.
threshold_reached = Signal()
