"""Indent the text of a script, so that people can read it."""

from __future__ import annotations

import re

#: Strings and comments. Words in them do not open or close a block.
_IGNORED = re.compile(r"'[^'\n]*'|--.*")
#: Words and brackets that open a block, and those that close one. "else" closes one block and opens the next; after
#: "elseif", the word "then" opens the next block.
_OPENS = re.compile(r"\b(?:function|do|then|else|repeat)\b|[({]")
_CLOSES = re.compile(r"\b(?:end|until|elseif|else)\b|[)}]")
#: The closing words and brackets with which a line begins. They close their blocks before the line is indented.
_LEADING_CLOSES = re.compile(r"(?:(?:end|until|elseif|else)\b|[)}\s])*")
#: The start of a line that continues the line before. Such a line is indented by one more step.
_CONTINUES = re.compile(r"(?:and|or) |\.\. ")


def indented(source: str) -> str:
    """Return the text of a script, indented by two spaces for each open block. Keep one of several empty lines."""
    out: list[str] = []
    depth = 0
    for line in source.strip("\n").split("\n"):
        text = line.strip()
        code = _IGNORED.sub("", text).strip()
        leading = _LEADING_CLOSES.match(code)
        indent = depth - len(_CLOSES.findall(leading[0] if leading else "")) + bool(_CONTINUES.match(code))
        out.append("  " * indent + text)
        depth += len(_OPENS.findall(code)) - len(_CLOSES.findall(code))
    return re.sub(r"\n{3,}", "\n\n", "\n".join(out)) + "\n"
