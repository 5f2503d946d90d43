"""Find the block or allow of a request, among any number of them and without asking the database.

Keys are found in a dictionary. Networks are kept by the length of their prefix, so a search looks once for each length
that is in use, however many networks there are.
"""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections.abc import Collection, Iterable
from socket import AF_INET, AF_INET6, inet_pton
from typing import TYPE_CHECKING, Any, NamedTuple

from django.db.models import Q
from django.utils import timezone

from ratelimits.algorithms.calendar import instant
from ratelimits.models.access.rows import Access
from ratelimits.rules.keyed import NEVER

if TYPE_CHECKING:
    from ratelimits.identity import Identity

logger = logging.getLogger(__name__)

_CHUNK = 2000


class AccessRow(NamedTuple):
    """A block, or an allow if `blocks` is false. Moments are in µs since 1970 UTC."""

    pk: int
    target: str
    blocks: bool
    status: int
    message: str
    valid_from: int
    valid_until: int


#: The networks of one family: by the number of bits beside their prefix, then by their prefix.
_Networks = dict[int, dict[int, tuple[AccessRow, ...]]]


class AccessIndex:
    """All blocks and allows at one version. It never changes."""

    __slots__ = ("_by_pk", "_keys", "_starts", "_v4", "_v6")

    def __init__(self, rows: Iterable[AccessRow] = (), before: AccessIndex | None = None) -> None:
        self._by_pk: dict[int, AccessRow] = {} if before is None else dict(before._by_pk)
        self._keys: dict[str, tuple[AccessRow, ...]] = {} if before is None else dict(before._keys)
        self._v4: _Networks = {} if before is None else {bits: dict(some) for bits, some in before._v4.items()}
        self._v6: _Networks = {} if before is None else {bits: dict(some) for bits, some in before._v6.items()}
        for row in rows:
            try:
                self._put(row)
            except (OSError, ValueError) as error:
                logger.error("Block or allow %s is not in force: %s is no key or network: %s", *row[:2], error)
        self._order()

    def __bool__(self) -> bool:
        return bool(self._by_pk)

    def __len__(self) -> int:
        return len(self._by_pk)

    def changed(self, rows: Collection[AccessRow], deleted: Collection[int]) -> AccessIndex:
        """Return the index without the deleted rows, then with these added or replaced."""
        if not rows and not deleted:
            return self
        index = AccessIndex(before=self)
        # A row whose target was changed is among both.
        for pk in {*deleted, *(row.pk for row in rows)}:
            index._remove(pk)
        for part in index._v4, index._v6:
            for bits in [bits for bits, some in part.items() if not some]:
                del part[bits]
        return AccessIndex(rows, index)

    def _put(self, row: AccessRow) -> None:
        """Add a row. Raise OSError or ValueError if its target is neither a key nor a network."""
        part, place = self._place(row.target)
        part[place] = (*part.get(place, ()), row)
        self._by_pk[row.pk] = row

    def _remove(self, pk: int) -> None:
        row = self._by_pk.pop(pk, None)
        if row is None:
            return
        part, place = self._place(row.target)
        left = tuple(one for one in part[place] if one.pk != pk)
        if left:
            part[place] = left
        else:
            del part[place]

    def _place(self, target: str) -> tuple[dict[Any, tuple[AccessRow, ...]], str | int]:
        """Return the dictionary that has the rows of a target, and their key in it."""
        kind, _colon, name = target.partition(":")
        text, slash, length = name.partition("/")
        if kind != "ip" or not slash or (":" in text and length == "64"):
            return self._keys, target
        family, size, networks = (AF_INET6, 128, self._v6) if ":" in text else (AF_INET, 32, self._v4)
        bits = size - int(length)
        return networks.setdefault(bits, {}), int.from_bytes(inet_pton(family, text), "big") >> bits

    def _order(self) -> None:
        """Put the narrowest networks first, and note when rows come into force."""
        self._v4, self._v6 = dict(sorted(self._v4.items())), dict(sorted(self._v6.items()))
        self._starts = sorted({row.valid_from for row in self._by_pk.values()} - {0})

    def next_start(self, now: int) -> int:
        """Return the next moment at which a row comes into force."""
        later = bisect_right(self._starts, now)
        return self._starts[later] if later < len(self._starts) else NEVER

    def find(self, identity: Identity, now: int) -> AccessRow | None:
        """Return the row that decides the requests of an identity; None if the rules decide.

        The nearest row decides: that of the API key, else of the user, else of the account; and that of the address,
        else of its narrowest network. If one of these two blocks, the request is blocked.
        """
        keys = self._keys
        who = None
        if keys:
            for key in (identity.api_key, identity.user, identity.account):
                if key in keys:
                    who = _in_force(keys[key], now)
                    if who is not None:
                        if who.blocks:
                            return who
                        break
        address = identity.address
        if address is None:
            return who
        where = _in_force(keys[address], now) if address in keys else None
        if where is None and (self._v4 or self._v6):
            where = self._of_network(address, now)
        return where if where is not None and (where.blocks or who is None) else who

    def _of_network(self, address: str, now: int) -> AccessRow | None:
        v6 = address.endswith("/64")
        networks = self._v6 if v6 else self._v4
        if not networks:
            return None
        try:
            packed = inet_pton(AF_INET6, address[3:-3]) if v6 else inet_pton(AF_INET, address[3:])
        except OSError:  # the key of requests without a readable address
            return None
        number = int.from_bytes(packed, "big")
        for bits, by_prefix in networks.items():
            rows = by_prefix.get(number >> bits)
            if rows is not None:
                row = _in_force(rows, now)
                if row is not None:
                    return row
        return None


NO_ACCESS = AccessIndex()


def _in_force(rows: tuple[AccessRow, ...], now: int) -> AccessRow | None:
    """Return the row in force. Of two, which only raw SQL can write, a block is stronger."""
    found = None
    for row in rows:
        if row.valid_from <= now < row.valid_until:
            if row.blocks:
                return row
            found = row
    return found


def of_model(row: Access) -> AccessRow:
    """Return a row of the table, saved or not, as it is kept here."""
    return _of_values((row.pk or 0, row.target, row.effect, row.status, row.message, row.valid_from, row.valid_until))


def _of_values(values: tuple[Any, ...]) -> AccessRow:
    pk, target, effect, status, message, begins, ends = values
    return AccessRow(
        pk,
        target,
        effect != Access.Effect.ALLOW,
        status,
        message,
        0 if begins is None else instant(begins),
        NEVER if ends is None else instant(ends),
    )


def read(using: str, above: int | None = None) -> list[AccessRow]:
    """Read the rows that have not ended; with `above`, all rows that changed after that version."""
    wanted = Q(version__gt=above) if above is not None else ~Q(valid_until__lte=timezone.now())
    rows = Access.objects.using(using).filter(wanted).order_by("pk")
    columns = "pk", "target", "effect", "status", "message", "valid_from", "valid_until"
    return [_of_values(values) for values in rows.values_list(*columns).iterator(_CHUNK)]
