"""Find the block or allow that applies to a request. All rows are in memory, and the search is fast for many rows too.

Keys are found in a dictionary. Networks are in one dictionary for each length of their prefix. So a search takes one
look-up for each length.
"""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections.abc import Collection, Iterable
from socket import AF_INET, AF_INET6, inet_pton
from typing import TYPE_CHECKING, Any, NamedTuple

from django.db.models import Q

from ratelimits import moments
from ratelimits.addresses import are_read_as_ipv4
from ratelimits.algorithms.calendar import instant
from ratelimits.models.access.rows import Access
from ratelimits.models.keys import key_name
from ratelimits.rules.keyed import NEVER

if TYPE_CHECKING:
    from ratelimits.identity import Identity

logger = logging.getLogger(__name__)

#: Number of rows that are fetched from the database at once.
_CHUNK = 2000


class AccessRow(NamedTuple):
    """A block, or an allow if `blocks` is false.

    `target` is the key or network as people write it. `valid_from` and `valid_until` are in µs since 1970 UTC. Without
    a start `valid_from` is 0, and without an end `valid_until` is NEVER. `status` and `message` are the status and the
    text of a block's response.
    """

    pk: int
    target: str
    blocks: bool
    status: int
    message: str
    valid_from: int
    valid_until: int


#: The networks of IPv4 or of IPv6. The keys of the outer dict are the numbers of bits after the prefix (8 for an IPv4
#: network /24). The keys of the inner dicts are the prefixes as numbers.
_Networks = dict[int, dict[int, tuple[AccessRow, ...]]]


class AccessIndex:
    """All blocks and allows at one version. An index never changes."""

    __slots__ = ("_by_pk", "_keys", "_starts", "_v4", "_v6")

    def __init__(self, rows: Iterable[AccessRow] = (), previous: AccessIndex | None = None) -> None:
        self._by_pk: dict[int, AccessRow] = {} if previous is None else dict(previous._by_pk)
        #: The rows of keys, of addresses and of IPv6 networks of the length 64, by target.
        self._keys: dict[str, tuple[AccessRow, ...]] = {} if previous is None else dict(previous._keys)
        self._v4: _Networks = (
            {} if previous is None else {bits: dict(by_prefix) for bits, by_prefix in previous._v4.items()}
        )
        self._v6: _Networks = (
            {} if previous is None else {bits: dict(by_prefix) for bits, by_prefix in previous._v6.items()}
        )
        for row in rows:
            try:
                self._put(row)
            except (OSError, ValueError) as error:
                logger.error(
                    "Block or allow %s is not in force. Its target %s is not a key or network: %s",
                    row.pk,
                    row.target,
                    error,
                )
        self._sort()

    def __bool__(self) -> bool:
        return bool(self._by_pk)

    def __len__(self) -> int:
        return len(self._by_pk)

    def changed(self, rows: Collection[AccessRow], deleted: Collection[int]) -> AccessIndex:
        """Return a new index in which `rows` are added or replaced. `deleted` are the ids of deleted rows."""
        if not rows and not deleted:
            return self
        index = AccessIndex(previous=self)
        # A row whose target was changed can be in both `rows` and `deleted`.
        for pk in {*deleted, *(row.pk for row in rows)}:
            index._remove(pk)
        for networks in index._v4, index._v6:
            for bits in [bits for bits, by_prefix in networks.items() if not by_prefix]:
                del networks[bits]
        return AccessIndex(rows, index)

    def _put(self, row: AccessRow) -> None:
        """Add a row. Raise OSError or ValueError if its target is neither a key nor a network."""
        rows_by_key, key = self._dictionary_of(row.target)
        other_rows = rows_by_key.get(key, ())
        # Raw SQL can write several rows for one target. Then a block decides, so blocks are first.
        rows_by_key[key] = (row, *other_rows) if row.blocks else (*other_rows, row)
        self._by_pk[row.pk] = row

    def _remove(self, pk: int) -> None:
        row = self._by_pk.pop(pk, None)
        if row is None:
            return
        rows_by_key, key = self._dictionary_of(row.target)
        other_rows = tuple(other for other in rows_by_key[key] if other.pk != pk)
        if other_rows:
            rows_by_key[key] = other_rows
        else:
            del rows_by_key[key]

    def _dictionary_of(self, target: str) -> tuple[dict[Any, tuple[AccessRow, ...]], str | int]:
        """Return the dictionary that contains the rows of a target, and the target's key in it."""
        kind, _colon, name = target.partition(":")
        text, slash, length = name.partition("/")
        if kind == "ip" and slash and ":" in text and are_read_as_ipv4(inet_pton(AF_INET6, text), int(length)):
            raise ValueError("its addresses are counted as IPv4 addresses, so write the IPv4 network")
        # An IPv6 network of the length 64 is found as a key: `Identity.address` is such a network.
        if kind != "ip" or not slash or (":" in text and length == "64"):
            return self._keys, key_name(target)
        family, size, networks = (AF_INET6, 128, self._v6) if ":" in text else (AF_INET, 32, self._v4)
        bits = size - int(length)
        return networks.setdefault(bits, {}), int.from_bytes(inet_pton(family, text), "big") >> bits

    def _sort(self) -> None:
        """Sort the networks, the smallest first, and note when rows come into force."""
        self._v4, self._v6 = dict(sorted(self._v4.items())), dict(sorted(self._v6.items()))
        # 0 stands for rows without a start.
        self._starts = sorted({row.valid_from for row in self._by_pk.values()} - {0})

    def next_start(self, now: int) -> int:
        """Return the next moment at which a row comes into force; NEVER if no row comes into force later."""
        later = bisect_right(self._starts, now)
        return self._starts[later] if later < len(self._starts) else NEVER

    def find(self, identity: Identity, now: int) -> AccessRow | None:
        """Return the block or allow that decides the requests of an identity; None if the rules decide.

        First look for a row of the API key, then of the user, then of the account. The first row that is in force is
        the caller's row. In the same way look for a row of the address, then of the smallest network that contains the
        address. If one of these two rows is a block, the block decides. If both are allows, the caller's row decides.

        A block of a view key decides before an allow. An allow of a view key decides only if there is no other row.
        """
        keys = self._keys
        caller_row = None
        user, api_key, account, address, view_keys = identity[:5]
        for key in (api_key, user, account):
            if key in keys:
                caller_row = _in_force(keys[key], now)
                if caller_row is not None:
                    if caller_row.blocks:
                        return caller_row
                    break
        if view_keys and (view_row := self._of_view_keys(view_keys, now)) is not None:
            if view_row.blocks:
                return view_row
            return self.find(identity._replace(view_keys=()), now) or view_row
        if address is None:
            return caller_row
        address_row = _in_force(keys[address], now) if address in keys else None
        if address_row is None:
            address_row = self._of_network(address, now)
        return address_row if address_row is not None and (address_row.blocks or caller_row is None) else caller_row

    def _of_view_keys(self, view_keys: tuple[str, ...], now: int) -> AccessRow | None:
        """Return the first block in force of one of these keys, or else the first allow."""
        rows = [row for key in view_keys if key in self._keys and (row := _in_force(self._keys[key], now)) is not None]
        return next((row for row in rows if row.blocks), rows[0] if rows else None)

    def _of_network(self, address: str, now: int) -> AccessRow | None:
        """Return the row of the smallest network that contains `address`, a key such as "ip:203.0.113.9"."""
        is_v6 = "/" in address
        networks = self._v6 if is_v6 else self._v4
        if not networks:
            return None
        try:
            # Leave out "ip:" at the start, and for IPv6 also "/64" at the end.
            packed = inet_pton(AF_INET6, address[3:-3]) if is_v6 else inet_pton(AF_INET, address[3:])
        except OSError:  # not an address: this is the key of requests whose address cannot be read
            return None
        number = int.from_bytes(packed, "big")
        for bits, by_prefix in networks.items():
            # Do the same as `_in_force`, but without a call, which takes longer: this runs for each request.
            for row in by_prefix.get(number >> bits, ()):
                if row.valid_from <= now < row.valid_until:
                    return row
        return None


#: The index if there is neither a block nor an allow.
NO_ACCESS = AccessIndex()


def _in_force(rows: tuple[AccessRow, ...], now: int) -> AccessRow | None:
    """Return the first row in force; None if no row is in force."""
    for row in rows:
        if row.valid_from <= now < row.valid_until:
            return row
    return None


def of_model(row: Access) -> AccessRow:
    """Return the AccessRow of a model instance. The instance need not be saved."""
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
    """Return the rows that have not ended. With `above`, return all rows that were changed after this version."""
    wanted = Q(version__gt=above) if above is not None else ~Q(valid_until__lte=moments.now())
    rows = Access.objects.using(using).filter(wanted).order_by("pk")
    columns = "pk", "target", "effect", "status", "message", "valid_from", "valid_until"
    return [_of_values(values) for values in rows.values_list(*columns).iterator(_CHUNK)]
