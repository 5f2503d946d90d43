"""Deleting the Redis keys of a customer's limits, whatever rules have written them."""

from __future__ import annotations

from collections.abc import Iterator

import redis

from ratelimits.algorithms.limits import ALGORITHMS
from ratelimits.conf import conf
from ratelimits.engine.call import shard
from ratelimits.engine.keys import Keyspace, own_name
from ratelimits.engine.server import current_server, on_each
from ratelimits.models import Customer, Move, Name, Rule
from ratelimits.usage.erasure.about import About

#: How many Redis keys are deleted by one command.
_TOGETHER = 500


class LimitKeys:
    """The names of all Redis keys in which limits of a customer can be counted, by shard.

    Make this before the erasure: it needs the names. Nothing is written instead of a deleted key: a reset would begin a
    lasting limit anew, under the name.
    """

    def __init__(self, customer: Customer) -> None:
        about, keyspace = About(conf.DATABASE, customer), current_server().keyspace
        own_names = list(_own_names(about.using))
        self._by_shard: dict[int, list[str]] = {}
        for number, key in sorted(_in_shards(about, keyspace)):
            names = self._by_shard.setdefault(number, [])
            names.append(keyspace.state(number, key))
            names += [keyspace.own(number, name, key) + ending for name, ending in own_names]

    def delete(self) -> int:
        """Delete the Redis keys, and return how many there were. Raise redis.exceptions.RedisError if this fails."""
        deleted: list[int] = []

        def delete_on_server(client: redis.Redis, shards: list[int]) -> None:
            with client.pipeline(transaction=False) as pipeline:
                for number in shards:
                    names = self._by_shard[number]
                    for first in range(0, len(names), _TOGETHER):
                        pipeline.unlink(*names[first : first + _TOGETHER])
                deleted.extend(pipeline.execute())

        on_each(current_server(), list(self._by_shard), delete_on_server)
        return sum(deleted)


def _in_shards(about: About, keyspace: Keyspace) -> set[tuple[int, str]]:
    """Return the limited keys that name the customer, each with a shard in which it can be counted."""
    found = {(shard(keyspace, key), key) for text in about.texts for key in _account_keys(about, text)}
    for key in about.own_keys(set(about.keys)):
        # A key with one account is counted in the shard of the account.
        found.add((shard(keyspace, key), key))
        found |= {(shard(keyspace, key, text, (key,)), key) for text in about.texts}
    return found


def _account_keys(about: About, text: str) -> Iterator[str]:
    """Yield the limited keys of an account text, as this customer has it, or a customer who has it no more."""
    counters = dict(Name.objects.using(about.using).filter(identifier=text).values_list("counter", "customer"))
    moves = Move.objects.using(about.using).filter(text=text).values_list("former", "customer")
    known = {pk for move in moves for pk in move} | {about.customer.pk}
    for counter in {*counters, *known}:
        if counters.get(counter, about.customer.pk) == about.customer.pk:
            yield f"account@{counter}:{text}" if counter else f"account:{text}"


def _own_names(using: str) -> Iterator[tuple[str, str]]:
    """Yield what stands for a limit in the names of its own keys, and the endings of these, of rules of all times."""
    letters = {algorithm.id: algorithm.storage for algorithm in ALGORITHMS.values() if algorithm.storage.own}
    history = Rule.history.using(using).filter(algorithm__in=letters)
    for algorithm, name in history.order_by().values_list("algorithm", "name").distinct():
        storage = letters[algorithm]
        for ending in ("", *storage.endings.values(), *storage.optional.values()):
            yield own_name(storage.own, name), ending
