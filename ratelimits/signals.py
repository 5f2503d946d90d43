"""Signals that a project can connect to."""

from __future__ import annotations

from django.dispatch import Signal

#: Sent in a worker when an account's usage has reached a threshold. `sender` is the model Alert. `alert` is the row,
#: with the account, the quantity, the amount and the period. It is sent again until every receiver has returned without
#: an exception. A receiver that must act only once can recognise a repetition by `alert.pk`.
threshold_reached = Signal()
