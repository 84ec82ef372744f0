"""Values that ranks of a traced world exchange, through their parent process.

A collective needs the values of the other ranks only where the host reads them: tensors on the
host, and integers on the GPU such as shapes and numbers of tokens. Everything else is recorded
only; `compare` finds differences later. Ranks wait in the parent, which so has the call and the
place of each, and finds a wait that never ends at once, without a time limit.
"""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any, Literal

from pacs_megatron.workbench.trace.collectives import Collective


class EndlessWaitError(RuntimeError):
    """Ranks wait for each other, and none of them can go on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ticket:
    """The place of a rank's payload: of a collective, or of a message between two ranks."""

    call: Collective
    number: int
    """of the collective in its group, or of the message between the two ranks"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """From a rank to the parent."""

    kind: Literal["post", "wait", "done"]
    ticket: Ticket | None = None
    payload: Any = None


@dataclass(frozen=True, slots=True)
class Reply:
    """From the parent to a rank that waits."""

    payload: Any
    hang: str = ""
    """why the wait would never end; empty if it ends"""


class Exchange:
    """The side of a rank."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._numbers: Counter[tuple[object, ...]] = Counter()

    def post(self, call: Collective, payload: Any) -> Ticket:
        """Gives this rank's payload to a collective, or sends it to `call.peer`. Does not wait."""
        ticket = self._ticket(call)
        # Pickled here: torch would send a tensor through shared memory, with a thread.
        data = pickle.dumps(payload)
        self._connection.send(Message(kind="post", ticket=ticket, payload=data))
        return ticket

    def receive(self, call: Collective) -> Ticket:
        """The next message of `call.peer`. Does not wait."""
        return self._ticket(call)

    def wait(self, ticket: Ticket) -> Any:
        """The payloads of all ranks of the group in its order, or the payload of the message.

        Raises EndlessWaitError if a rank never comes, or comes with another operation.
        """
        self._connection.send(Message(kind="wait", ticket=ticket))
        reply: Reply = self._connection.recv()
        if reply.hang:
            raise EndlessWaitError(reply.hang)
        if ticket.call.peer is not None:
            return pickle.loads(reply.payload)  # noqa: S301  (of a rank of this program)
        return [pickle.loads(data) for data in reply.payload]  # noqa: S301

    def meet(self, call: Collective, payload: Any) -> list[Any]:
        """`post`, then `wait`."""
        payloads: list[Any] = self.wait(self.post(call, payload))
        return payloads

    def finish(self, result: Mapping[str, Any]) -> None:
        """Sends the result of the rank, which ends."""
        self._connection.send(Message(kind="done", payload=result))

    def _ticket(self, call: Collective) -> Ticket:
        key = (call.group,) if call.peer is None else (call.name, call.peer)
        number = self._numbers[key]
        self._numbers[key] += 1
        return Ticket(call=call, number=number)


class Exchanges:
    """The side of the parent."""

    def __init__(self, connections: Mapping[int, Connection]) -> None:
        """By rank."""
        self._connections = dict(connections)
        self._running = set(connections)
        """ranks that compute"""
        self._waiting: dict[int, Ticket] = {}
        self._posted: dict[tuple[object, ...], dict[int, tuple[Collective, Any]]] = {}
        """call and payload by collective or message, and by rank"""
        self._results: dict[int, dict[str, Any]] = {}
        self.hang = ""
        """the first wait that would never have ended; empty without one"""

    def serve(self) -> dict[int, dict[str, Any] | None]:
        """The result of each rank after all have ended; None of one that died."""
        ranks = {connection: rank for rank, connection in self._connections.items()}
        while self._running or self._waiting:
            self._complete()
            if self._waiting and not self._running:
                self._release()
            for connection in wait([self._connections[rank] for rank in self._running]):
                assert isinstance(connection, Connection)
                self._read(ranks[connection], connection)
        return {rank: self._results.get(rank) for rank in self._connections}

    def _read(self, rank: int, connection: Connection) -> None:
        try:
            message: Message = connection.recv()
        except EOFError:
            self._running.discard(rank)
            return
        if message.kind == "done":
            self._results[rank] = message.payload
            self._running.discard(rank)
            return

        assert message.ticket is not None
        if message.kind == "post":
            call = message.ticket.call
            posted = self._posted.setdefault(_key(rank, message.ticket), {})
            posted[rank] = (call, message.payload)
        else:
            self._running.discard(rank)
            self._waiting[rank] = message.ticket

    def _complete(self) -> None:
        """Replies to every rank whose wait is over."""
        for rank, ticket in list(self._waiting.items()):
            call = ticket.call
            posted = self._posted.get(_key(rank, ticket), {})
            if call.peer is not None:
                if call.peer in posted:
                    self._reply(rank, Reply(posted[call.peer][1]))
                continue
            if len(posted) < len(call.ranks):
                continue
            kinds = {of_rank.kind for of_rank, _ in posted.values()}
            if len(kinds) == 1:
                self._reply(rank, Reply([posted[member][1] for member in call.ranks]))

    def _release(self) -> None:
        """Ends every wait by an error."""
        hang = self._description()
        self.hang = self.hang or hang
        for rank in list(self._waiting):
            self._reply(rank, Reply(None, hang))

    def _reply(self, rank: int, reply: Reply) -> None:
        del self._waiting[rank]
        self._running.add(rank)
        self._connections[rank].send(reply)

    def _description(self) -> str:
        parts = []
        for rank in self._connections:
            ticket = self._waiting.get(rank)
            if ticket is None:
                parts.append(f"rank {rank} has ended")
                continue
            call = ticket.call
            if call.peer is None:
                whom = f"in the group of ranks {list(call.ranks)}"
            else:
                whom = f"from rank {call.peer}"
            parts.append(f"rank {rank} waits in {call.name} {whom} at {call.place}")
        return "; ".join(parts)


def _key(rank: int, ticket: Ticket) -> tuple[object, ...]:
    """Of a collective, or of a message, the same for all of its ranks."""
    call = ticket.call
    if call.peer is None:
        return call.group, call.ranks, ticket.number
    pair = (rank, call.peer) if call.name == "send" else (call.peer, rank)
    return "message", pair, ticket.number
