"""How things are now, and what was admitted and refused lately, for the status page of the admin."""

from __future__ import annotations
