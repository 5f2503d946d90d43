"""The data of the admin's status page: the present state of the system, and the requests of the last days."""

from __future__ import annotations
