"""Make the text of a script from the template lua/decide.lua and the files of the algorithms."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence

from ratelimits.engine.assemble import scripts
from ratelimits.engine.assemble.algorithm_files import LuaFunction, divided, rarely, without_unused
from ratelimits.engine.assemble.shape import REQUEST_NUMBERS, Shape, renews
from ratelimits.engine.assemble.states import HEADER, RULE, LimitText, StateLines
from ratelimits.engine.keys import SHARD_KEYS

#: The start of a directive: a line of the template that says what to do, such as "--: for limit" (see lua/decide.lua).
_DIRECTIVE = "--: "


class ScriptText(StateLines):
    """Writes the text of one script."""

    def __init__(self, shape: Shape, *, in_tables: bool) -> None:
        super().__init__(shape, in_tables=in_tables)
        self.in_tables = in_tables
        #: The Lua files of the limits' algorithms, by name.
        self.files = {limit.file.name: limit.file for limit in self.limits}
        #: By name: the text that replaces "${name}" in the template.
        self.values = self._values()
        #: The functions of the Lua files that belong to no algorithm. `full_text` removes the functions that the script
        #: does not call.
        self.functions_of_files: list[LuaFunction] = []

    def _values(self) -> dict[str, str]:
        shape = self.shape
        heads = [f"KEYS[{number}]" for number in range(1, shape.heads + 1)]
        states = [f"KEYS[{number}]" for number in self.state_keys]
        request = "<" + "d" * (REQUEST_NUMBERS + shape.costs)
        return {
            "costs": "".join(f", cost_of_{number}" for number in range(1, shape.costs + 1)),
            "request": request,
            "mget": ", ".join([*heads, *states]),
            "head_count": str(shape.heads),
            "heads_differ": " or ".join(f"got[{n}] ~= ARGV[2]" for n in range(1, shape.heads + 1)),
            "receipt_key": f"KEYS[{shape.open_key + 1 if shape.meters else shape.open_key}]",
            **SHARD_KEYS,
        }

    def expand(self, lines: Sequence[str], limit: LimitText | None = None) -> Iterator[str]:
        """Yield the lines of a script. Follow the directives in these lines of the template."""
        number = 0
        while number < len(lines):
            line = lines[number].rstrip("\n")
            number += 1
            if not line.startswith(_DIRECTIVE):
                yield self.bound(scripts.filled(line, self.values), limit)
                continue
            word, _space, argument = line.removeprefix(_DIRECTIVE).partition(" ")
            if word == "do":
                yield from self.do(argument, limit)
                continue
            block, else_block, number = _block(lines, number)
            if word == "for":
                yield from self.for_limits(block)
            elif argument == "limit enforced":
                assert limit is not None
                yield from self.for_enforced(block, limit)
            elif self.holds(argument):
                yield from self.expand(block, limit)
            else:
                yield from self.expand(else_block, limit)

    def bound(self, text: str, limit: LimitText | None) -> str:
        return limit.bind(text) if limit is not None else text

    def holds(self, condition: str) -> bool:
        """Return whether a condition of the template holds: the name of a flag, or "not" and the name of a flag."""
        name = condition.removeprefix("not ")
        return self.flags[name] is (name == condition)

    def for_limits(self, block: Sequence[str]) -> Iterator[str]:
        """Yield the lines of a block for each limit."""
        for limit in self.limits:
            yield from self.expand(block, limit)

    def for_enforced(self, block: Sequence[str], limit: LimitText) -> Iterator[str]:
        """Yield the lines of a block if the mode of the limit is enforce."""
        if not limit.shape.shadow:
            yield from self.expand(block, limit)

    def do(self, name: str, limit: LimitText | None) -> Iterator[str]:
        """Yield the lines for the directive "do name".

        Outside of a loop over the limits, these are the lines of the method do_<name>, if it exists. Otherwise they are
        the section with this name.
        """
        special: Callable[[], Iterator[str]] | None = getattr(self, f"do_{name}", None)
        if special is not None and limit is None:
            yield from special()
        else:
            assert limit is not None
            yield from self.section(name, limit)

    def section(self, name: str, limit: LimitText) -> Iterator[str]:
        """Yield the lines of a section of the limit's algorithm, or of a section that is made here.

        These sections are made here:
        after_resolve  what can follow `resolve`: the limit starts anew, or the script replies that the call's params
                       are not valid at the moment of the decision
        lost           the test whether the state of a lasting limit must be restored from the ledger
        renew          after a reset: a lasting limit gets a new state (see `renews`)
        """
        if name == "after_resolve":
            parts = "".join(map(limit.section, ("resolve", "initial")))
            if "l.starts_anew" in parts:
                yield limit.bind("if l.starts_anew then")
                yield from self.section("initial", limit)
                yield "end"
            if "l.stale" in parts:
                # -2 is NOT_VALID_NOW in decision.py.
                yield limit.bind("if l.stale then return write_struct('<i8i8', -2, now) end")
            return
        if name == "lost":
            yield from map(limit.bind, self.lost(limit))
            return
        if name == "renew":
            if renews(self.shape):
                yield limit.bind(f"if {limit.lasting} > 0 then l.written, l.removed = true, true end")
            return
        yield from super().section(name, limit)

    def lost(self, limit: LimitText) -> Iterator[str]:
        """Yield the lines that find out whether the state of a lasting limit must be restored from the ledger.

        In these lines, `marks >= 2` means that the caller decides the limits of the call for the first time in this run
        of the server. `lasting` is LimitShape.lasting: if it is 2, a limit without a state is always restored. If the
        clock was ahead and has stepped back, the state is perhaps of a later window, without the counts of this window.
        """
        op, lasting = self.shape.op, limit.lasting
        if lasting == "0" or op not in ("try", "restore", "reset"):
            return
        yield f"if {lasting} > 0 then"
        if self.shape.virtual:
            yield f"l.lost = {lasting} >= 2 and not l.last"
        else:
            if_needed = "(not l.last or marks >= 2) and " if op == "try" else ""
            stepped_back = "l.shift > 0 or " if op != "reset" else ""
            charged = "l.last and l.last + l.shift"
            test = f"is_lost({lasting} >= 2, {charged}, l.start, now, {limit.state})"
            yield f"l.lost = {stepped_back}{if_needed}{test}"
        if op == "try":
            # -3 is LOST in decision.py.
            yield "if l.lost then return write_struct('<i8i8', -3, now) end"
        yield "end"

    # -- parts of the template that are written here --------------------------------------------------------------

    def do_preamble(self) -> Iterator[str]:
        yield f"local rules_at = {self._rules_at()} -- the rule of limit n begins at rules_at + {RULE} * n in ARGV[4]"
        yield from self.functions()

    def functions(self) -> Iterator[str]:
        """Yield the functions that the other parts of the script call."""
        files = {
            "rules": True,
            "heads": self.flags["counts"] or self.flags["heads"],
            "records": bool(self.files),
            "numbers": bool(self.files),
        }
        parts = [divided(scripts.text(name)) for name, needed in files.items() if needed]
        self.functions_of_files = [one for part in parts for one in (*part.named, *part.rarely)]
        parts += [file.functions for file in self.files.values()]
        yield "local at -- the moment of the decision"
        yield "local rarely"
        for part in parts:
            yield from self.expand(part.usual.splitlines())
        yield from self.expand(list(rarely([function for part in parts for function in part.rarely])))
        if self.flags["lasting"] and self.flags["heads"]:
            yield from self.expand(scripts.text("lasting").splitlines())

    def do_batch_functions(self) -> Iterator[str]:
        for name in ("run", "batch", "counting/usage_new"):
            yield from scripts.text(name).splitlines()

    @staticmethod
    def _program_fields(limit: LimitText) -> tuple[str, list[str]]:
        """Return the struct format of the limit's values in ARGV[4], and the names of its fields."""
        fields = ["header", *(["timeout"] if limit.shape.waits else []), *limit.params]
        return f"c{HEADER}" + "d" * (len(fields) - 1), fields

    def _rules_at(self) -> int:
        """Return `rules_at`: the rule of limit n begins at rules_at + RULE * n in ARGV[4]. n begins at 1."""
        return sum(HEADER + 8 * (limit.shape.waits + len(limit.params)) for limit in self.limits) + 1 - RULE

    def do_limits(self) -> Iterator[str]:
        """Yield the lines that read the fields of the limits from the program (ARGV[4]).

        If the fields are local variables, one call of struct reads all of them.
        """
        if self.in_tables:
            yield from self._limits_in_tables()
        elif self.limits:
            yield from self._limits_in_locals()

    def _limits_in_tables(self) -> Iterator[str]:
        position = 1
        for limit in self.limits:
            values = [f"cost = cost_of_{limit.shape.slot}", *limit.known_fields]
            yield f"local {limit.table} = {{{', '.join(values)}}}"
            form, names = self._program_fields(limit)
            yield f"{', '.join(map(limit.name, names))} = read_struct('<{form}', ARGV[4], {position})"
            position += HEADER + 8 * (len(names) - 1)

    def _limits_in_locals(self) -> Iterator[str]:
        whole_form = "<"
        variables: list[str] = []
        for limit in self.limits:
            form, names = self._program_fields(limit)
            whole_form += form
            variables += map(limit.name, names)
        yield f"local {', '.join(variables)} = read_struct('{whole_form}', ARGV[4])"
        for limit in self.limits:
            yield f"local {limit.name('cost')} = cost_of_{limit.shape.slot}"
            yield f"--locals {limit.number}"

    def counting_functions(self) -> Iterator[str]:
        """Yield the functions that count usage.

        The script defines these functions only where it calls them, because most calls do not need them.
        """
        parts = [divided(scripts.text(name)) for name in ("counting/usage", "counting/usage_of_rule")]
        self.functions_of_files += [function for part in parts for function in part.named]
        for part in parts:
            yield from part.usual.splitlines()

    def do_count(self) -> Iterator[str]:
        shape, open_key = self.shape, f"KEYS[{self.shape.open_key}]"
        # For each meter: its number, and the Lua expressions of its counter's name and of its cost.
        meters = [(number, f"ARGV[{4 + number}]", f"cost_of_{number}") for number in range(1, shape.meters + 1)]
        yield "local new = 0"
        if shape.op == "settle":
            yield from self.counting_functions()
            for _meter, counter, cost in meters:
                yield f"new = new + {self.settled(open_key, counter, cost)}"
            yield from self.counted(open_key)
            return
        yield "-- Usually the request is admitted, and costs one unit of each meter. Then each meter needs one counter."
        shadows = [limit.bind("l.ok") for limit in self.limits if limit.shape.shadow]
        yield f"if {' and '.join(['allowed', *(f'{cost} == 1' for _meter, _counter, cost in meters), *shadows])} then"
        for _meter, counter, _cost in meters:
            # Pass the text '1' and not the number 1: the server would have to convert the number to text.
            yield f"if call('HINCRBY', {open_key}, {counter} .. '|1', '1') == 1 then new = new + 1 end"
        yield "else"
        yield from self.counting_functions()
        yield "if allowed then"
        for meter, counter, cost in meters:
            yield f"new = new + usage_add({open_key}, {counter}, {cost}, 1)"
            for limit in self.limits:
                if limit.shape.shadow and limit.shape.slot == meter:
                    added = f"usage_add({open_key}, counter_of_rule('s', {counter}, l.number), {cost}, 1)"
                    yield limit.bind(f"if not l.ok then new = new + {added} end")
        if shape.counts_refusal:
            yield "else"
            for _meter, counter, cost in meters:
                yield f"new = new + usage_add({open_key}, counter_of_rule('d', {counter}, binding), {cost}, 1)"
        yield "end"
        yield "end"
        yield from self.counted(open_key)

    def settled(self, open_key: str, counter: str, cost: str) -> str:
        """Return the Lua expression that counts a settled cost. Its value is the number of new counters.

        The name of a counter begins with its kind: 'a' for admitted units, 'r' for units that are given back. A
        negative cost is given back. If a whole receipt is refunded, its request is given back too: the counter of kind
        'r' also counts one request.
        """
        kind = "'r'" if self.shape.whole else f"({cost} < 0 and 'r' or 'a')"
        return f"usage_add({open_key}, {kind} .. string.sub({counter}, 2), math.abs({cost}), {int(self.shape.whole)})"

    def counted(self, open_key: str) -> Iterator[str]:
        """Yield the line that follows the counting. If there are new counters, the batch may be new or full."""
        run = "run or string.match(ARGV[2], ' (.*)$')"
        yield f"if new > 0 then rarely().batch_functions().count_new({open_key}, ARGV[1], {run}, now, new) end"

    def do_reply(self) -> Iterator[str]:
        # The nine numbers of the decision. Three numbers for each limit follow.
        values = "1, allowed and 1 or 0, binding, remaining, retry, reset, allowed and wait or 0, at, now"
        for limit in self.limits:
            values += limit.bind(", l.ok and 1 or 0, l.remaining, l.reset")
        yield f"return write_struct('<{'i8' * (9 + 3 * len(self.limits))}', {values})"

    def full_text(self) -> str:
        """Return the text of the script."""
        lines = list(self.expand(scripts.text("decide").splitlines()))
        for index, line in enumerate(lines):
            if line.startswith(("--locals ", "--table ", "--fields ")):
                lines[index] = self.limits[int(line.split()[1]) - 1].filled(line)
        return without_unused("\n".join(lines) + "\n", self.functions_of_files)

    @property
    def locals(self) -> int:
        """Return the approximate number of local variables of the script's main function."""
        functions = sum(len(re.findall(r"^local ", file.functions.usual, re.MULTILINE)) for file in self.files.values())
        of_limits = sum(1 if limit.in_table else len(limit.used) for limit in self.limits)
        # The template has about 45 local variables, and each packed state has four (see read_state).
        return 45 + functions + self.shape.costs + 4 * len(self.state_keys) + of_limits


def _block(lines: Sequence[str], start: int) -> tuple[list[str], list[str], int]:
    """Return the lines of a block, the lines after its "else", and the number of the line after its "end"."""
    parts: tuple[list[str], list[str]] = [], []
    part, depth, number = 0, 1, start
    while True:
        line = lines[number]
        number += 1
        if line.startswith(("--: if ", "--: for ")):
            depth += 1
        elif line.startswith("--: end"):
            depth -= 1
            if depth == 0:
                return *parts, number
        elif line.startswith("--: else") and depth == 1:
            part = 1
            continue
        parts[part].append(line)
