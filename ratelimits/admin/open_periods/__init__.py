"""Open periods in the admin: a list, a preview of the reports of chosen periods, and a page to close one by force."""

from __future__ import annotations
