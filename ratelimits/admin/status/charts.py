"""Bar charts as SVG, drawn by the server in the colours of the admin; the table beside them has the same numbers."""

from __future__ import annotations

from collections.abc import Sequence

from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString

#: The height of the highest bar, and the width that each bar has to itself, in units of the drawing.
_HEIGHT, _WIDTH, _GAP = 100, 10, 2
#: The least height of a bar that is not 0, so that one refusal among a million requests can still be seen.
_LEAST = 2


def bars(kind: str, description: str, values: Sequence[int], labels: Sequence[str]) -> SafeString:
    """Return a bar for each value; the highest fills the height. Each bar shows its label and value under a pointer.

    `kind` becomes the class by which the style sheet chooses a colour. The drawing is stretched to its place, so it has
    no text.
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
