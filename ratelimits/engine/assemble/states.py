"""Write the lines of a script about its limits: their fields, and how their packed states are read and written.

The Lua files write a field of a limit as `l.cost`. It is replaced by a name that the script can use. lua/records.lua
describes packed states. The form of a record says which fields it contains, and their types. Most records of a limit
have the limit's usual form. A record has another form if the usual form cannot hold one of its numbers.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from ratelimits.engine.assemble.algorithm_files import AlgorithmFile, RecordForm, algorithm_file
from ratelimits.engine.assemble.shape import LimitShape, Shape, flags, renews

#: A field of a limit, as the Lua files write it: `l.cost`.
_FIELD = re.compile(r"\bl\.([a-z_][a-z_0-9]*)", re.IGNORECASE)
#: Maximum number of values that one call of struct reads or writes. A Lua function has at most 250 registers.
_MAX_VALUES = 180
#: Number of bytes of a record's header: the limit's name, the code of the algorithm, and the size of the
#: payload (4 + 1 + 2).
HEADER = 7
#: At the end of a program, each limit has this number of bytes for its rule. lua/decide.lua describes these bytes.
RULE = 30
#: The Lua expression of a limit's name, which is the first part of its header.
NAME = "string.sub(l.header, 1, 4)"


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


def common_form(limits: Sequence[LimitText]) -> tuple[str, int] | None:
    """Return the struct format and the size in bytes of a packed state.

    The state has one record for each of these limits, in the usual form of the limit.

    Return None if a limit has no usual form, or if the state has more values than one call of struct can read.
    """
    if not all(limit.shape.form for limit in limits):
        return None
    records = [limit.form for limit in limits]
    # Each record also has two values that are not in its payload: the header and the expiry.
    if sum(2 + len(record.names) for record in records) > _MAX_VALUES:
        return None
    # I4: the expiry of the packed state has 4 bytes. The expiry of each record also has 4 bytes.
    form = "<I4" + "".join(f"c{HEADER}I4{record.format}" for record in records)
    return form, 4 + sum(HEADER + 4 + record.size for record in records)


def _fields(limit: LimitText) -> str:
    """Return the fields of a record from its expiry on, separated by commas."""
    return ", ".join(["l.expiry", *(f"l.{name}" for name in limit.form.names)])


class StateLines:
    """The limits of a script, and the lines that read and write their states."""

    def __init__(self, shape: Shape, *, in_tables: bool) -> None:
        self.shape = shape
        self.limits = [
            LimitText(number, limit, shape, in_table=in_tables) for number, limit in enumerate(shape.limits, 1)
        ]
        self.flags = flags(shape)

    def section(self, name: str, limit: LimitText) -> Iterator[str]:
        """Yield the lines of a section of the limit's algorithm."""
        if limit.section(name):
            yield "do"
            yield from limit.lines(name)
            yield "end"

    @property
    def state_keys(self) -> list[int]:
        """Return the positions in KEYS of the Redis keys with records, in order and without repetition."""
        return sorted({limit.state_key for limit in self.shape.limits})

    def of_state(self, key: int) -> list[LimitText]:
        """Return the limits whose records are in the Redis key at this position in KEYS."""
        return [limit for limit in self.limits if limit.shape.state_key == key]

    def do_states(self) -> Iterator[str]:
        for number, key in enumerate(self.state_keys, 1):
            yield from self.read_state(number, key)

    def read_state(self, number: int, key: int) -> Iterator[str]:
        """Yield the lines that read packed state `number`. `key` is the position of its Redis key in KEYS.

        Variables in these lines, for number 1:
        raw_1     the packed state as a string; false if there is none
        fits_1    whether all records of these limits were read at once
        from_1    the position in raw_1 from which the format of `common_form` is read. The format begins with four
                  bytes for an expiry, so from_1 is four bytes before these records
        latest_1  the number in the four bytes at from_1. If from_1 is 1, it is the expiry of the packed state.
                  Otherwise it has no meaning, because the four bytes belong to another record
        """
        limits, reset = self.of_state(key), self.flags["reset"]
        raw = f"raw_{number}"
        yield f"local {raw}, fits_{number} = got[{self.shape.heads + number}], false"
        yield f"local latest_{number}, from_{number} = 0, 1"
        if not self.finds_other_types_late:
            yield f"if not {raw} then"
            yield from self.no_state(limits, key)
            yield "end"
        common = common_form(limits)
        if common is not None and not reset:
            form, size = common
            yield "-- Try to read the records of these limits at once. They must follow each other in this order, and"
            yield "-- have their usual forms. Usually they begin the packed state. If not, find the first of these"
            yield "-- records, and try once more. If there is none, the loop ends."
            yield f"while {raw} and #{raw} >= from_{number} + {size - 1} do"
            headers = [f"h{i}" for i in range(len(limits))]
            yield f"local {', '.join(headers)}"
            reads, tests = [f"latest_{number}"], []
            for header, limit in zip(headers, limits, strict=True):
                reads += [header, limit.bind(_fields(limit))]
                tests.append(limit.bind(f"{header} == l.header"))
            yield f"{', '.join(reads)} = read_struct('{form}', {raw}, from_{number})"
            yield f"if {' and '.join(tests)} then"
            yield f"fits_{number} = true"
            for limit in limits:
                present = "l.has_record = true"
                if limit.form.fixed:
                    names = ", ".join(f"l.{name}" for name in limit.form.fixed)
                    present += f" {names} = {', '.join(limit.form.fixed.values())}"
                if_expired = "" if self.shape.virtual else "if l.expiry * 1e6 <= now then l.last = nil else "
                yield limit.bind(f"{if_expired}{present}{' end' if if_expired else ''}")
            yield "break"
            yield "end"
            position = limits[0].bind(f"rarely().position({raw}, l.header)")
            yield f"from_{number} = from_{number} == 1 and {position} or #{raw}"
            yield "end"
        yield f"if {raw} and not fits_{number} then"
        yield f"local starts = rarely().scan({raw})"
        yield "if not starts then"
        if reset:
            yield f"call('UNLINK', KEYS[{key}])"
            yield f"{raw}, starts = false, {{}}"
        else:
            yield f"return rarely().corrupt(KEYS[{key}])"
        yield "end"
        for limit in limits:
            yield from self.read_record(limit, raw, f"starts[{NAME}]", f"KEYS[{key}]")
        yield "end"

    @property
    def finds_other_types_late(self) -> bool:
        """Return whether the script notices a Redis key of another type only when it writes the state.

        This saves a command at the first request of a limit. It is possible if nothing is charged or counted before the
        write: the call has one packed state, and its limits have no own keys.
        """
        one_key = len(self.state_keys) == 1 and not any(limit.own_key for limit in self.shape.limits)
        return one_key and self.shape.op == "try" and not self.shape.general

    def no_state(self, limits: Sequence[LimitText], key: int) -> Iterator[str]:
        """Yield the lines for a Redis key in which MGET found no string.

        Usually this Redis key does not exist, and the limits' own keys do not exist either. If this Redis key exists,
        it has another type: the state is corrupt.
        """
        # If `own_key` is 0, the limit has no own key. If `own_key` is `key`, the limit has only one own key, and its
        # record is there.
        with_own_keys = [limit for limit in limits if limit.shape.own_key not in (0, key)]
        test = f"if call('EXISTS', KEYS[{key}]) == 1 then"
        if with_own_keys:
            keys = [f"KEYS[{key}]", *(name for limit in with_own_keys for name in limit.own_keys)]
            # While a cluster moves the slot, own keys that are not in KEYS may be on another node. Then this command
            # fails.
            yield f"if redis.pcall('EXISTS', {', '.join(keys)}) == 0 then"
            for limit in with_own_keys:
                yield limit.bind("l.keys_absent = true")
            test = f"else{test}"
        yield test
        yield f"call('UNLINK', KEYS[{key}])" if self.flags["reset"] else f"return rarely().corrupt(KEYS[{key}])"
        yield "end"

    def read_record(self, limit: LimitText, raw: str, start: str, key: str) -> Iterator[str]:
        """Yield the lines that read one record at any position of the packed state.

        `raw`, `start` and `key` are Lua expressions: the packed state, the record's position (nil if there is no such
        record), and the Redis key.
        """
        yield "do"
        yield limit.bind(f"local raw, pos = {raw}, {start}")
        yield limit.bind("l.last = nil")
        yield "if pos then"
        yield "local _, code, size, expiry, from = read_struct('<I4BI2I4', raw, pos)"
        yield "if true then" if self.shape.virtual else "if expiry * 1e6 > now then"
        yield limit.bind("l.has_record, l.expiry = true, expiry")
        if not self.flags["reset"]:
            yield limit.bind("if code == l.code then")
            yield from self.section("read", limit)
            yield limit.bind(f"if not l.last then return rarely().corrupt({key}) end")
            yield "end"
        yield "end"
        yield "end"
        yield "end"

    def do_write_states(self) -> Iterator[str]:
        for number, key in enumerate(self.state_keys, 1):
            yield from self.write_state(number, key)

    def write_state(self, number: int, key: int) -> Iterator[str]:
        """Yield the lines that write packed state `number`. `key` is the position of its Redis key in KEYS."""
        limits = self.of_state(key)
        raw = f"raw_{number}"
        changed = "l.removed" if self.flags["reset"] else "l.written"
        yield f"if {' or '.join(limit.bind(changed) for limit in limits)} then"
        yield "local value, latest -- the packed state, and its expiry: the latest expiry of its records"
        common = common_form(limits)
        latest_before = ""
        if common is not None and not self.flags["reset"]:
            latest_before = "latest_before"
            yield f"local {latest_before}"
            form, size = common
            usual = [f"(fits_{number} or not {raw})"]
            values = ["latest"]
            for limit in limits:
                usual += map(limit.bind, ["l.written", *limit.form.conditions])
                values.append(limit.bind(f"l.header, {_fields(limit)}"))
            yield f"if {' and '.join(usual)} then"
            yield f"latest = from_{number} == 1 and latest_{number} or read_struct('<I4', {raw})"
            yield f"latest_before = {raw} and latest"
            for limit in limits:
                yield limit.bind("if l.expiry > latest then latest = l.expiry end")
            yield f"value = write_struct('{form}', {', '.join(values)})"
            yield f"if {raw} and #{raw} > {size} then"
            yield "-- There are other records, before or after these."
            yield f"if from_{number} > 1 then"
            yield f"local front = string.sub({raw}, 5, from_{number} + 3)"
            yield "value = write_struct('<I4', latest) .. front .. string.sub(value, 5)"
            yield "end"
            yield f"value = value .. string.sub({raw}, from_{number} + {size})"
            yield "end"
            yield "else"
        yield "local names, records = {}, {}"
        for limit in limits:
            yield limit.bind(f"if {changed} then")
            yield from self.new_record(limit)
            yield "end"
        yield f"value, latest = rarely().rewrite({raw}, names, records, {self.moment})"
        if common is not None and not self.flags["reset"]:
            yield "end"
        yield from self.set_state(f"KEYS[{key}]", latest_before, raw if self.finds_other_types_late else "")
        yield "end"

    @property
    def moment(self) -> str:
        """Return the moment for the Lua function `rewrite`, which leaves out records that have expired at this moment.

        The result is Lua text. If the clock is virtual, the moment is -1, so no record is left out.
        """
        return "-1" if self.shape.virtual else "now"

    def new_record(self, limit: LimitText) -> Iterator[str]:
        """Yield the lines that add the limit's record to `names` and `records`, the arguments of `rewrite`.

        In a reset, a limit usually gets no new record: `false` in `records` removes the old record.
        """
        yield limit.bind(f"local name = {NAME}")
        if self.flags["reset"]:
            yield "records[name] = false"
            if not renews(self.shape):
                return
            yield limit.bind("if l.written then")
        yield from self.section("pack", limit)
        yield "names[#names + 1] = name"
        yield limit.bind("records[name] = write_struct('<c4BI2I4', name, l.code, #l.payload, l.expiry) .. l.payload")
        if self.flags["reset"]:
            yield "end"

    def set_state(self, key: str, latest_before: str = "", raw: str = "") -> Iterator[str]:
        """Yield the lines that write a packed state, `value`. `key` is the Lua expression of its Redis key.

        `latest_before` is the Lua name of the expiry that the packed state had before; "" if it is not known. `raw` is
        the Lua name of the old packed state; "" if the script has already tested that the Redis key is a string or does
        not exist.
        """
        yield f"if not value then call('UNLINK', {key})"
        lasts = "" if self.shape.virtual else ", 'PX', latest * 1000 - (now - now % 1000) / 1000"
        if raw:
            yield "-- Without a state the key must not exist: if it does, it has another type."
            yield f"elseif not {raw} then"
            yield f"if not call('SET', {key}, value{lasts}, 'NX') then return rarely().corrupt({key}) end"
        if self.shape.virtual:
            yield f"else call('SET', {key}, value) end"
            return
        if latest_before:
            # If the expiry does not change, KEEPTTL saves time on the server. But if the moment comes from the request,
            # it can differ from the server's clock. Then the key needs a new time to live.
            yield f"elseif by_server and latest == {latest_before} then call('SET', {key}, value, 'KEEPTTL')"
        yield f"else call('SET', {key}, value{lasts}) end"
