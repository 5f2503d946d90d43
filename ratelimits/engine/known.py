"""The command that asks whether Redis has a state of a limited key."""

from __future__ import annotations

from ratelimits.engine.assemble.scripts import Script, resp
from ratelimits.engine.call import Call, shard
from ratelimits.engine.command import state_keys
from ratelimits.engine.keys import Keyspace


class StatesExist:
    """The command that returns how many states Redis has of one key of a call. `position` is the key's position."""

    script = Script(b"", b"")  # the command needs no script

    def __init__(self, keyspace: Keyspace, call: Call, position: int) -> None:
        shards = [shard(keyspace, key, call.account, call.in_account) for key in call.keys]
        names = zip(state_keys(keyspace, call, shards), call.program.states, strict=True)
        self._keys = [name.encode() for name, state in names if state.key == position]

    @property
    def key(self) -> bytes:
        """Return one of the command's Redis keys. In a cluster the node is found by this key."""
        return self._keys[0]

    def to_bytes(self, run: str, nonce: bytes) -> bytes:
        """Return the command in RESP."""
        return resp(b"EXISTS", *self._keys)
