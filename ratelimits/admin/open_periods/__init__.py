"""Open periods in the admin: a list, a preview of the reports of periods, and a page to close a period by force."""

from __future__ import annotations
