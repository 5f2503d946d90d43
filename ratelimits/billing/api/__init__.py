"""`/usage/report/`: the part of the API that a project with bills has."""

from __future__ import annotations
