"""Tell people that nothing was drained to the ledger yet, and what to start."""

from __future__ import annotations

from django.utils.translation import gettext as _

from ratelimits.models import ShardState


def nothing_drained() -> str:
    """Return the text that pages show before the first drain."""
    return _(
        "Nothing was drained to the ledger yet, so no usage and no refusals are known here. Start a Celery worker with"
        " beat, or run ratelimits_seal and then ratelimits_drain."
    )


def before_first_drain(using: str) -> str:
    """Return the text of `nothing_drained`; "" if a shard was drained. This makes one query."""
    was_drained = ShardState.objects.using(using).filter(watermark__gt=0).exists()
    return "" if was_drained else nothing_drained()
