"""Bar charts as SVG, drawn by the server. A table on the page has the same numbers."""

from __future__ import annotations

from collections.abc import Sequence

from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString

#: The height of the highest bar, the width of a bar with the gap after it, and that gap, in SVG units.
_HEIGHT, _WIDTH, _GAP = 100, 10, 2
#: Minimum height of a bar for a number above 0, so that one refusal among a million requests can be seen.
_LEAST = 2


def bars(kind: str, description: str, values: Sequence[int], labels: Sequence[str]) -> SafeString:
    """Return a drawing with a bar for each value. The highest bar fills the height.

    A bar shows its label and value when the pointer is over it. `kind` is part of the CSS class that sets the colour.
    The drawing has no text, because it is stretched to the size of its place.
    """
    highest = max(values, default=0)
    heights = [max(_HEIGHT * value // highest, _LEAST) if value else 0 for value in values]
    drawn = format_html_join(
        "",
        '<rect x="{}" y="{}" width="{}" height="{}"><title>{}: {}</title></rect>',
        (
            (_WIDTH * number, _HEIGHT - height, _WIDTH - _GAP, height, label, f"{value:,}")
            for number, (height, value, label) in enumerate(zip(heights, values, labels, strict=True))
            if value
        ),
    )
    return format_html(
        '<svg class="ratelimits-bars ratelimits-{}" viewBox="0 0 {} {}" preserveAspectRatio="none" role="img"'
        ' aria-label="{}">{}</svg>',
        kind,
        max(_WIDTH * len(values) - _GAP, 1),
        _HEIGHT,
        description,
        drawn,
    )
