"""Make the text of a general script.

Two kinds of calls use a general script: calls with very many limits, and calls of a new shape in a process that has
already made scripts for very many shapes.

A general script decides like the script of a shape, and is made from the same template and files. But it stores the
limits in a list, and has loops over this list where the script of a shape has lines for each limit. So one script is
enough for any limits. It needs one more argument, the *layout* of the call. A layout has these packed numbers (formats
of Lua's struct library):

once             '<I2I2I2'   the number of heads, the number of meters, the position of the key `open` in KEYS
for each limit   '<BBI2I2B'  the algorithm's code, the slot of the cost, the position in KEYS of the Redis key with the
                             record, the position in KEYS of the first own key (0: none), and the flags
flags            a sum: 1 for a shadow limit, 2 for a limit with a longest wait of its own, 4 * LimitShape.lasting
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from functools import lru_cache

from ratelimits.algorithms.limits import ALGORITHMS
from ratelimits.engine.assemble import scripts
from ratelimits.engine.assemble.algorithm_files import AlgorithmFile, algorithm_file
from ratelimits.engine.assemble.script_text import ScriptText
from ratelimits.engine.assemble.shape import REQUEST_NUMBERS, Shape
from ratelimits.engine.assemble.states import HEADER, NAME, RULE, LimitText

#: The numbers of one limit in a layout, as a format of Python's struct. The docstring of this module explains them.
_LIMIT = struct.Struct("<BBHHB")


def layout(shape: Shape) -> bytes:
    """Return the layout of a call."""
    limits = [
        _LIMIT.pack(
            one.algorithm.code, one.slot, one.state_key, one.own_key, one.shadow + 2 * one.waits + 4 * one.lasting
        )
        for one in shape.limits
    ]
    return struct.pack("<HHH", shape.heads, shape.meters, shape.open_key) + b"".join(limits)


def general_shape(shape: Shape) -> Shape:
    """Return the shape without the parts that are in the layout, so that many shapes share one general script."""
    return shape._replace(
        limits=(), heads=min(shape.heads, 1), costs=0, meters=min(shape.meters, 1), open_key=0, general=True
    )


def _files() -> dict[str, AlgorithmFile]:
    return {file.name: file for file in map(algorithm_file, ALGORITHMS.values())}


class AnyLimit(LimitText):
    """A limit inside a loop over all limits of the call. Its fields are in the table `l`."""

    def __init__(self, call: Shape) -> None:
        lease = "ARGV[6 + meter_count]" if call.lease else "ARGV[1]"
        announces = "true" if call.announces else "false"
        slots_move = "true" if call.slots_move else "false"
        self.known = {"lease": lease, "announces": announces, "is_alone": "#L == 1", "slots_move": slots_move}
        self.in_table, self.table, self.lasting, self.state = True, "l", "l.lasting", "KEYS[l.state_key]"
        self.used = {}
        self.files = _files()

    def section(self, name: str) -> str:
        """Return the Lua text that chooses the section of the limit's algorithm."""
        lines: list[str] = []
        for file in self.files.values():
            if text := file.section(name):
                lines += [f"{'elseif' if lines else 'if'} l.kind == '{file.name}' then", text.rstrip("\n")]
        return "\n".join([*lines, "end"]) if lines else ""


class GeneralText(ScriptText):
    """Writes the text of a general script."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape, in_tables=True)
        self.any, self.files = AnyLimit(shape), _files()
        self.values |= {
            "costs": "",
            "request": "<" + "d" * REQUEST_NUMBERS,
            "mget": "unpack(to_read)",
            "head_count": "head_count",
            "heads_differ": "heads_differ(got)",
            "receipt_key": "KEYS[open_key + (meter_count > 0 and 1 or 0)]",
        }

    def for_limits(self, block: Sequence[str]) -> Iterator[str]:
        yield "for number = 1, #L do"
        yield "local l = L[number]"
        yield from self.expand(block, self.any)
        yield "end"

    def for_enforced(self, block: Sequence[str], limit: LimitText) -> Iterator[str]:
        yield "if not l.shadow then"
        yield from self.expand(block, limit)
        yield "end"

    def do_preamble(self) -> Iterator[str]:
        yield "local head_count, meter_count, open_key, layout_at = read_struct('<I2I2I2', ARGV[5])"
        yield f"local rules_at -- the rule of limit n begins at the position rules_at + {RULE} * n in ARGV[4]"
        yield from self.functions()
        yield "-- Returns whether the head of a shard differs from the expected one."
        yield "local function heads_differ(got)"
        yield "for i = 1, head_count do"
        yield "if got[i] ~= ARGV[2] then return true end"
        yield "end"
        yield "end"
        # ARGV[3] has REQUEST_NUMBERS numbers, and then the costs, each of 8 bytes. Slots and positions begin at 1.
        yield "-- Returns a cost of the request."
        first_cost = 8 * REQUEST_NUMBERS + 1
        yield f"local function cost_of(slot) return (read_struct('<d', ARGV[3], {first_cost - 8} + 8 * slot)) end"

    def do_limits(self) -> Iterator[str]:
        # In the Lua text, L is the list of the limits, and to_read is the list of the Redis keys that MGET reads.
        # `place` is a position in the program (ARGV[4]), and `layout_at` is a position in the layout (ARGV[5]).
        yield "local L, to_read, place = {}, {}, 1"
        yield "for i = 1, head_count do to_read[i] = KEYS[i] end"
        yield "while layout_at <= #ARGV[5] do"
        yield "local l, flags, waits = {number = #L + 1, timeout = timeout}"
        yield "l.code, l.slot, l.state_key, l.own_key, flags, layout_at = read_struct('<BBI2I2B', ARGV[5], layout_at)"
        yield "l.shadow, waits, l.cost = flags % 2 == 1, flags % 4 >= 2, cost_of(l.slot)"
        yield "l.lasting = (flags - flags % 4) / 4"
        yield f"if l.own_key > 0 then l.redis_key, l.slots_move = KEYS[l.own_key], {self.any.known['slots_move']} end"
        yield f"l.header, place = read_struct('<c{HEADER}', ARGV[4], place)"
        yield "if waits then l.timeout, place = read_struct('<d', ARGV[4], place) end"
        if self.shape.at_once:
            yield "l.timeout = 0"
        # Algorithms with the same file and the same params share the lines that read the params.
        kinds: dict[tuple[str, tuple[str, ...]], list[str]] = {}
        for kind in ALGORITHMS.values():
            file = algorithm_file(kind)
            kinds.setdefault((file.name, file.params_of(kind)), []).append(f"l.code == {kind.code}")
        for number, ((name, params), codes) in enumerate(kinds.items()):
            fields = [f"l.{param}" for param in params if param != "-"]  # "-" is not sent to the script
            yield f"{'elseif' if number else 'if'} {' or '.join(codes)} then"
            yield f"l.kind = '{name}'"
            yield f"{', '.join(fields)}, place = read_struct('<{'d' * len(fields)}', ARGV[4], place)"
        yield "end"
        yield "L[#L + 1], to_read[#to_read + 1] = l, KEYS[l.state_key]"
        yield "end"
        yield f"rules_at = place - {RULE}"

    def do_states(self) -> Iterator[str]:
        reset = self.flags["reset"]
        yield "local states = {}"
        yield "for number = 1, #L do"
        yield "local l = L[number]"
        yield "local key = KEYS[l.state_key]"
        yield "local state = states[l.state_key]"
        yield "if not state then"
        yield "state = {raw = got[head_count + number], starts = {}}"
        yield "states[l.state_key] = state"
        yield "if not state.raw and call('EXISTS', key) == 1 then"
        yield "call('UNLINK', key)" if reset else "return rarely().corrupt(key)"
        yield "end"
        yield "if state.raw then state.starts = rarely().scan(state.raw) end"
        yield "if not state.starts then"
        if reset:
            yield "call('UNLINK', key)"
            yield "state.raw, state.starts = false, {}"
        else:
            yield "return rarely().corrupt(key)"
        yield "end"
        yield "end"
        yield from self.read_record(self.any, "state.raw", f"state.starts[{NAME}]", "key")
        yield "end"

    def do_write_states(self) -> Iterator[str]:
        reset = self.flags["reset"]
        yield "for number = 1, #L do"
        yield "local l = L[number]"
        yield f"if l.{'removed' if reset else 'written'} then"
        yield "local state = states[l.state_key]"
        yield "local names, records = state.names or {}, state.records or {}"
        yield "state.names, state.records = names, records"
        yield from self.new_record(self.any)
        yield "end"
        yield "end"
        yield "for state_key, state in pairs(states) do"
        yield "if state.names then"
        yield f"local value, latest = rarely().rewrite(state.raw, state.names, state.records, {self.moment})"
        yield from self.set_state("KEYS[state_key]")
        yield "end"
        yield "end"

    def do_count(self) -> Iterator[str]:
        shape = self.shape
        yield from self.counting_functions()
        yield "local new, open = 0, KEYS[open_key]"
        yield "for meter = 1, meter_count do"
        yield "local counter, cost = ARGV[5 + meter], cost_of(meter)"
        if shape.op == "settle":
            yield f"new = new + {self.settled('open', 'counter', 'cost')}"
        else:
            yield "if allowed then"
            yield "new = new + usage_add(open, counter, cost, 1)"
            yield "for number = 1, #L do"
            yield "local l = L[number]"
            yield "if l.shadow and not l.ok and l.slot == meter then"
            yield "new = new + usage_add(open, counter_of_rule('s', counter, number), cost, 1)"
            yield "end"
            yield "end"
            if shape.counts_refusal:
                yield "else"
                yield "new = new + usage_add(open, counter_of_rule('d', counter, binding), cost, 1)"
            yield "end"
        yield "end"
        yield from self.counted("open")

    def do_reply(self) -> Iterator[str]:
        yield "local reply = {1, allowed and 1 or 0, binding, remaining, retry, reset, allowed and wait or 0, at, now}"
        yield "for number = 1, #L do"
        # A limit has three numbers, after the nine numbers of the decision.
        yield "local l, place = L[number], 3 * number + 7"
        yield "reply[place], reply[place + 1], reply[place + 2] = l.ok and 1 or 0, l.remaining, l.reset"
        yield "end"
        yield "return write_struct('<' .. string.rep('i8', #reply), unpack(reply))"


def general_script(shape: Shape) -> scripts.Script:
    """Return the general script for calls of this shape."""
    return made(general_shape(shape))


@lru_cache(maxsize=64)
def made(general: Shape) -> scripts.Script:
    """Return the general script for a shape without the parts that are in the layout."""
    return scripts.script(GeneralText(general).full_text())
