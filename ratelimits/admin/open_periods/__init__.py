"""Open periods in the admin: the list, the preview of their reports, and closing one by force."""

from __future__ import annotations
