"""What the commands measure: this app, its peers, and the floors under both."""

from __future__ import annotations
