"""Replace the fields of a limit in Lua text, such as `l.cost`, by names that a script can use."""

from __future__ import annotations

import re
from collections.abc import Iterator

from ratelimits.engine.assemble.algorithm_files import AlgorithmFile, RecordForm, algorithm_file
from ratelimits.engine.assemble.shape import LimitShape, Shape

#: A field of a limit, as the Lua files write it: `l.cost`.
_FIELD = re.compile(r"\bl\.([a-z_][a-z_0-9]*)", re.IGNORECASE)


class LimitText:
    """Makes the text of a script for one limit of a call: replaces the fields `l.x` by variables of this limit."""

    def __init__(self, number: int, shape: LimitShape, call: Shape, *, in_table: bool) -> None:
        self.number, self.shape = number, shape
        self.file: AlgorithmFile = algorithm_file(shape.algorithm)
        #: Whether the fields are in a table. Otherwise they are local variables.
        self.in_table = in_table
        #: The name of the limit's table, if its fields are in a table.
        self.table = f"l_{number}"
        #: The names of the params that the script gets. A param with the name "-" is not sent to the script.
        self.params = tuple(name for name in self.file.params_of(shape.algorithm) if name != "-")
        # The longest accepted wait, as Lua text: no wait, the limit's own longest wait, or the timeout of the call.
        timeout = "0" if call.at_once else self.name("timeout") if shape.waits else "timeout"
        #: LimitShape.lasting of this limit, as Lua text. (The subclass in general.py has the text "l.lasting".)
        self.lasting = str(shape.lasting)
        #: The Redis key with the limit's record, as Lua text. (In the subclass: "KEYS[l.state_key]".)
        self.state = f"KEYS[{shape.state_key}]"
        #: For each field whose value is known when the script is made: this value, as Lua text.
        self.known = {
            "number": str(number),
            "code": str(shape.algorithm.code),
            "slot": str(shape.slot),
            "timeout": timeout,
            "lease": f"ARGV[{5 + call.meters}]" if call.lease else "ARGV[1]",
            "announces": "true" if call.announces else "false",
            "is_alone": "true" if len(call.limits) == 1 else "false",
            "slots_move": "true" if call.slots_move else "false",
        }
        if shape.own_key:
            self.known["redis_key"] = f"KEYS[{shape.own_key}]"
        #: The names of the fields that the text has used so far, in order. The values of this dict mean nothing: it is
        #: an ordered set.
        self.used: dict[str, None] = {}

    def name(self, field: str) -> str:
        """Return the name of a field of this limit."""
        return f"{self.table}.{field}" if self.in_table else f"{field}_{self.number}"

    def bind(self, text: str) -> str:
        """Replace each `l.x` in a text by a known value, a local variable, or a field of the limit's table."""

        if "l." not in text:
            return text

        def replacement(found: re.Match[str]) -> str:
            field = found[1]
            if field in self.known:
                return self.known[field]
            self.used[field] = None
            return self.name(field)

        return _FIELD.sub(replacement, text)

    @property
    def own_keys(self) -> list[str]:
        """Return the Lua expressions of all Redis keys that belong to this limit alone.

        This includes the optional keys, which are not in the script's KEYS.
        """
        if not self.shape.own_key:
            return []
        storage, first = self.shape.algorithm.storage, self.known["redis_key"]
        return [
            first,
            *(f"{first} .. '{ending}'" for ending in (*storage.endings.values(), *storage.optional.values())),
        ]

    @property
    def known_fields(self) -> list[str]:
        """Return entries "field = value" of the limit's table: the known values that the algorithm's functions use."""
        return [f"{field} = {value}" for field, value in self.known.items() if field in self.file.shared]

    @property
    def form(self) -> RecordForm:
        """Return the form in which the limit's record is usually stored."""
        return self.file.form(self.shape.form)

    def lines(self, section: str) -> Iterator[str]:
        """Yield the lines of a section of the algorithm.

        A line may pass the limit itself to a function, as `l.self`. If the fields are local variables, the script puts
        them into a table before such a line, and reads them from the table after it. The fields of the limit are
        known only when all lines of the script have been made. Until then, the comments "--table" and "--fields" stand
        for these two steps. `filled` replaces the comments.
        """
        text = self.section(section).rstrip("\n")
        if "l.self" not in text:
            yield self.bind(text)
            return
        for line in text.split("\n"):
            if "l.self" not in line:
                yield self.bind(line)
            elif self.in_table:
                yield self.bind(line.replace("l.self", self.table))
            else:
                yield f"--table {self.number}"
                yield self.bind(line.replace("l.self", "self"))
                yield f"--fields {self.number}"

    def declared(self) -> list[str]:
        """Return the used fields that need a declaration as local variables.

        The header, the cost, the timeout and the params need none: the lines that read them also declare them.
        """
        return [name for name in self.used if name not in {"header", "cost", "timeout", *self.params}]

    def filled(self, line: str) -> str:
        """Return the Lua text that replaces a comment "--locals", "--table" or "--fields". All fields must be known."""
        if line.startswith("--locals"):
            return f"local {', '.join(map(self.name, self.declared()))}"
        shared = self.file.shared
        if line.startswith("--fields"):
            fields = [field for field in self.declared() if field in shared]
            return f"{', '.join(map(self.name, fields))} = {', '.join(f'self.{field}' for field in fields)}"
        each_once = dict.fromkeys([*self.used, "cost", *self.params])
        values = [f"{field} = {self.name(field)}" for field in each_once if field in shared]
        return f"local self = {{{', '.join([*self.known_fields, *values])}}}"

    def section(self, name: str) -> str:
        """Return the Lua text of a section of the algorithm. Return "" if the algorithm does not have this section."""
        return self.file.section(name)
