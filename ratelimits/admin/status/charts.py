"""Bar charts as SVG, which the server draws. The page also has a table with the same numbers."""

from __future__ import annotations

from collections.abc import Sequence

from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString

#: In SVG units: the height of the highest bar, the gap between two bars, and the width of a bar together with a gap.
_HEIGHT, _GAP, _STEP = 100, 2, 10
#: Minimum height of a bar for a number above 0. So a bar for one refusal can be seen beside a bar for a million.
_MIN_HEIGHT = 2


def bars(kind: str, description: str, values: Sequence[int], labels: Sequence[str]) -> SafeString:
    """Return a chart with a bar for each value. The highest bar has the full height.

    When the pointer is over a bar, the browser shows the bar's label and value. `kind` is part of the CSS class that
    sets the colour. No text is drawn in the chart, because the browser would stretch the text.
    """
    highest = max(values, default=0)
    heights = [max(_HEIGHT * value // highest, _MIN_HEIGHT) if value else 0 for value in values]
    rectangles = format_html_join(
        "",
        '<rect x="{}" y="{}" width="{}" height="{}"><title>{}: {}</title></rect>',
        (
            (_STEP * number, _HEIGHT - height, _STEP - _GAP, height, label, f"{value:,}")
            for number, (height, value, label) in enumerate(zip(heights, values, labels, strict=True))
            if value
        ),
    )
    return format_html(
        '<svg class="ratelimits-bars ratelimits-{}" viewBox="0 0 {} {}" preserveAspectRatio="none" role="img"'
        ' aria-label="{}">{}</svg>',
        kind,
        max(_STEP * len(values) - _GAP, 1),
        _HEIGHT,
        description,
        rectangles,
    )
