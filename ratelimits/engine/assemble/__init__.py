"""Assemble the deciding script for one shape of calls.

A shape is everything about a call that does not change from one request to the next: the algorithms of its limits,
their modes, how many keys and meters there are, and so on. lua/decide.lua is the template of all scripts. The comment
at its start describes the directives.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from ratelimits.engine.assemble import scripts
from ratelimits.engine.assemble.general import general_script, layout
from ratelimits.engine.assemble.script_text import ScriptText
from ratelimits.engine.assemble.shape import LimitShape, Shape

__all__ = ["Assembled", "LimitShape", "Shape", "assembled"]

#: Maximum number of local variables in a script. A script that would have more has the fields of its limits in tables
#: instead. Lua allows 200; this maximum is lower because ScriptText.locals is approximate.
_MAX_LOCALS = 175
#: A call with more limits uses the general script.
_MAX_LIMITS = 16
#: A process makes at most this number of scripts for single shapes. Calls of further shapes use the general script. So
#: the number of scripts on a server does not grow without limit.
_MAX_SCRIPTS = 256


class Assembled(NamedTuple):
    """A script, and the layout of the call. Only the general script needs a layout. For other scripts it is None."""

    script: scripts.Script
    layout: bytes | None


@lru_cache(maxsize=4096)
def assembled(shape: Shape) -> Assembled:
    """Return the script for a shape."""
    if len(shape.limits) > _MAX_LIMITS or assembled.cache_info().currsize >= _MAX_SCRIPTS:
        return Assembled(general_script(shape), layout(shape))
    text = ScriptText(shape, in_tables=False)
    lua = text.full_text()
    if text.locals > _MAX_LOCALS:
        lua = ScriptText(shape, in_tables=True).full_text()
    return Assembled(scripts.script(lua), None)
