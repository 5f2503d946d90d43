"""What staff do to one key, each with a reason, a confirmation and a record: block, allow, reset, grant."""

from __future__ import annotations
