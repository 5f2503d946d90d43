"""Many rows at once in the admin: a file is chosen, its differences are shown, and then it is imported."""

from __future__ import annotations
