"""Responses and conversations in SQLite, in memory or in a file that only this user can read."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from jaxis.errors import ConfigError
from jaxis.server.http.body import new_id

FILE = "responses.sqlite"
MAX_CHAIN = 10_000
"""Most responses that one may go back to."""
_BUSY_SECONDS = 5.0
_ROW_BYTES = 200  # of a row, beside its text
# In the order of tables: what holds items, the items, and which responses' bodies have an output item.
_SCHEMA = """
CREATE TABLE IF NOT EXISTS held (
    id TEXT PRIMARY KEY, owner TEXT NOT NULL, kind TEXT NOT NULL, previous TEXT, body TEXT NOT NULL,
    num_bytes INTEGER NOT NULL, used REAL NOT NULL
);
CREATE INDEX IF NOT EXISTS held_used ON held (used);
CREATE TABLE IF NOT EXISTS item (
    place INTEGER PRIMARY KEY AUTOINCREMENT, holder TEXT NOT NULL REFERENCES held (id) ON DELETE CASCADE,
    id TEXT NOT NULL, body TEXT NOT NULL
);
CREATE INDEX IF NOT EXISTS item_holder ON item (holder, id);
CREATE INDEX IF NOT EXISTS item_id ON item (id);
CREATE TABLE IF NOT EXISTS output_item (
    id TEXT NOT NULL, response TEXT NOT NULL REFERENCES held (id) ON DELETE CASCADE
);
CREATE INDEX IF NOT EXISTS output_item_id ON output_item (id);
CREATE INDEX IF NOT EXISTS output_item_response ON output_item (response);
"""
# An item by its id, in what an owner's responses said, or else in what its objects hold.
_FIND_ITEM = """
SELECT said.value, held.id FROM output_item JOIN held ON held.id = response, json_each(held.body, '$.output') AS said
WHERE output_item.id = ? AND owner = ? AND used >= ? AND json_extract(said.value, '$.id') = output_item.id
UNION ALL
SELECT item.body, held.id FROM item JOIN held ON held.id = holder WHERE item.id = ? AND owner = ? AND used >= ?
LIMIT 1
"""
_logger = logging.getLogger(__name__)

Kind = Literal["response", "conversation"]
Json = dict[str, Any]


@dataclass(frozen=True)
class Page:
    """A range of a list's items.

    Attributes:
      after: Id of the item before the first; None begins with the first.
      limit: Most items.
      descending: True if the last come first.
    """

    after: str | None = None
    limit: int = 20
    descending: bool = True


class Database:
    """Objects of owners, which hold items. Every method may be called by any thread.

    An object is removed when it was not used for `ttl_seconds`, or when there is no room: the least recently used go
    first. Several servers may share a file.

    Args:
      folder: Folder of the file; None keeps all in memory.
      max_bytes: Most bytes of all objects, counted as text.
      ttl_seconds: Time that an object stays after its last use.
      clock: Function that returns seconds since 1970.

    Raises:
      ConfigError: The file cannot be used.
    """

    def __init__(
        self, folder: Path | None, max_bytes: int, ttl_seconds: float, clock: Callable[[], float] = time.time
    ) -> None:
        self._max_bytes, self._ttl_seconds, self._clock = max_bytes, ttl_seconds, clock
        self._lock = threading.Lock()
        self._connection = _open(folder)

    def put(
        self, owner: str, kind: Kind, object_id: str, body: Json, items: Sequence[Json], previous: str | None = None
    ) -> None:
        """Adds an object, under a new id, with its items, each with an `id`.

        `body` is all of it but the items; a response's has an `output`, of items with an `id` each. `previous` is the
        response that it continues.
        """
        with self._transaction() as connection:
            text, texts = json.dumps(body), [json.dumps(item) for item in items]
            said = [(item["id"], object_id) for item in body.get("output", ())]
            num_bytes = _num_bytes(text, *texts) + _ROW_BYTES * len(said)
            row = (object_id, owner, kind, previous, text, num_bytes, self._clock())
            connection.execute("INSERT INTO held VALUES (?, ?, ?, ?, ?, ?, ?)", row)
            connection.executemany("INSERT INTO output_item VALUES (?, ?)", said)
            _insert_items(connection, object_id, items, texts)
            self._make_room(connection)

    def get(self, owner: str, kind: Kind, object_id: str) -> Json | None:
        """Returns an object without its items; None if this owner has no such object."""
        with self._transaction() as connection:
            return self._find(connection, owner, kind, object_id)

    def chain(self, owner: str, object_id: str) -> list[tuple[Json, list[Json]]] | None:
        """Returns a response and its predecessors, the first one first, each with its items; None if one is gone."""
        found: list[tuple[Json, list[Json]]] = []
        following: str | None = object_id
        with self._transaction() as connection:
            while following is not None:
                body = self._find(connection, owner, "response", following)
                if body is None or len(found) == MAX_CHAIN:
                    return None
                found.append((body, _items(connection, following)))
                [following] = connection.execute("SELECT previous FROM held WHERE id = ?", (following,)).fetchone()
        return found[::-1]

    def update(self, owner: str, kind: Kind, object_id: str, body: Json) -> bool:
        """Replaces an object's body; False if this owner has no such object."""
        with self._transaction() as connection:
            if (before := self._find(connection, owner, kind, object_id)) is None:
                return False
            text = json.dumps(body)
            grown = len(text) - len(json.dumps(before))
            connection.execute(
                "UPDATE held SET body = ?, num_bytes = num_bytes + ? WHERE id = ?", (text, grown, object_id)
            )
            self._make_room(connection)
            return True

    def delete(self, owner: str, kind: Kind, object_id: str) -> bool:
        """Removes an object with its items; False if this owner has no such object."""
        with self._transaction() as connection:
            found = connection.execute(
                "DELETE FROM held WHERE id = ? AND owner = ? AND kind = ?", (object_id, owner, kind)
            )
            return found.rowcount == 1

    def add_items(self, owner: str, object_id: str, items: Sequence[Json]) -> bool:
        """Appends items to a conversation; False if this owner has no such conversation."""
        with self._transaction() as connection:
            if self._find(connection, owner, "conversation", object_id) is None:
                return False
            texts = [json.dumps(item) for item in items]
            _insert_items(connection, object_id, items, texts)
            self._grow(connection, object_id, _num_bytes(*texts))
            self._make_room(connection)
            return True

    def items(self, owner: str, kind: Kind, object_id: str) -> list[Json] | None:
        """Returns all items of an object, in their order; None if this owner has no such object."""
        with self._transaction() as connection:
            if self._find(connection, owner, kind, object_id) is None:
                return None
            return _items(connection, object_id)

    def page(self, owner: str, kind: Kind, object_id: str, page: Page) -> tuple[list[Json], bool] | None:
        """Returns some items of an object, and whether more follow; None if this owner has no such object or item."""
        with self._transaction() as connection:
            if self._find(connection, owner, kind, object_id) is None:
                return None
            order, beyond, place = ("DESC", "<", 1 << 62) if page.descending else ("ASC", ">", 0)
            if page.after is not None:
                select = "SELECT place FROM item WHERE holder = ? AND id = ?"
                if (row := connection.execute(select, (object_id, page.after)).fetchone()) is None:
                    return None
                [place] = row
            rows = connection.execute(
                f"SELECT body FROM item WHERE holder = ? AND place {beyond} ? ORDER BY place {order} LIMIT ?",
                (object_id, place, page.limit + 1),
            ).fetchall()
            return [json.loads(text) for [text] in rows[: page.limit]], len(rows) > page.limit

    def item(self, owner: str, object_id: str, item_id: str) -> Json | None:
        """Returns one item of a conversation; None if this owner has no such conversation or item."""
        with self._transaction() as connection:
            if self._find(connection, owner, "conversation", object_id) is None:
                return None
            select = "SELECT body FROM item WHERE holder = ? AND id = ?"
            row = connection.execute(select, (object_id, item_id)).fetchone()
            return None if row is None else json.loads(row[0])

    def find_items(self, owner: str, item_ids: Iterable[str]) -> dict[str, Json]:
        """Finds items by their ids in this owner's objects and in the outputs of its responses."""
        found: dict[str, Json] = {}
        with self._transaction() as connection:
            for item_id in item_ids:
                values = (item_id, owner, self._clock() - self._ttl_seconds)
                if (row := connection.execute(_FIND_ITEM, values * 2).fetchone()) is not None:
                    found[item_id] = json.loads(row[0])
                    connection.execute("UPDATE held SET used = ? WHERE id = ?", (self._clock(), row[1]))
        return found

    def delete_item(self, owner: str, object_id: str, item_id: str) -> bool:
        """Removes one item of a conversation; False if this owner has no such conversation or item."""
        with self._transaction() as connection:
            if self._find(connection, owner, "conversation", object_id) is None:
                return False
            where = (object_id, item_id)
            row = connection.execute("SELECT sum(length(body)) FROM item WHERE holder = ? AND id = ?", where).fetchone()
            found = connection.execute("DELETE FROM item WHERE holder = ? AND id = ?", where).rowcount
            self._grow(connection, object_id, -(row[0] or 0) - found * _ROW_BYTES)
            return found > 0

    def close(self) -> None:
        with self._lock:
            self._connection.close()

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._lock, self._connection:
            self._connection.execute("BEGIN IMMEDIATE")
            yield self._connection

    def _find(self, connection: sqlite3.Connection, owner: str, kind: Kind, object_id: str) -> Json | None:
        """Returns an object, and marks it as used now."""
        now = self._clock()
        row = connection.execute(
            "SELECT body FROM held WHERE id = ? AND owner = ? AND kind = ? AND used >= ?",
            (object_id, owner, kind, now - self._ttl_seconds),
        ).fetchone()
        if row is None:
            return None
        connection.execute("UPDATE held SET used = ? WHERE id = ?", (now, object_id))
        return json.loads(row[0])

    def _grow(self, connection: sqlite3.Connection, object_id: str, num_bytes: int) -> None:
        connection.execute("UPDATE held SET num_bytes = num_bytes + ? WHERE id = ?", (num_bytes, object_id))

    def _make_room(self, connection: sqlite3.Connection) -> None:
        connection.execute("DELETE FROM held WHERE used < ?", (self._clock() - self._ttl_seconds,))
        [used] = connection.execute("SELECT coalesce(sum(num_bytes), 0) FROM held").fetchone()
        if used <= self._max_bytes:
            return
        for object_id, num_bytes in connection.execute("SELECT id, num_bytes FROM held ORDER BY used").fetchall():
            if used <= self._max_bytes:
                return
            connection.execute("DELETE FROM held WHERE id = ?", (object_id,))
            used -= num_bytes


def _num_bytes(*texts: str) -> int:
    return sum(len(text) + _ROW_BYTES for text in texts)


def _insert_items(connection: sqlite3.Connection, holder: str, items: Sequence[Json], texts: Sequence[str]) -> None:
    rows = [(holder, item["id"], text) for item, text in zip(items, texts, strict=True)]
    connection.executemany("INSERT INTO item (holder, id, body) VALUES (?, ?, ?)", rows)


def _items(connection: sqlite3.Connection, holder: str) -> list[Json]:
    rows = connection.execute("SELECT body FROM item WHERE holder = ? ORDER BY place", (holder,))
    return [json.loads(text) for [text] in rows]


def _open(folder: Path | None) -> sqlite3.Connection:
    """Opens the file, and puts a damaged one aside. Raises ConfigError if it cannot be used."""
    if folder is None:
        return _connect(":memory:")
    path = folder / FILE
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600))
        os.chmod(path, 0o600)  # raises an error if the file is another user's
        try:
            return _connect(path)
        except sqlite3.DatabaseError as error:
            if isinstance(error, sqlite3.OperationalError):
                raise
            aside = path.with_name(f"{FILE}.damaged-{new_id('at')[3:11]}")
            _logger.warning("stored responses: %s is damaged (%s); it is now %s", path, error, aside.name)
            path.rename(aside)
            for more in ("-wal", "-shm"):
                path.with_name(f"{FILE}{more}").unlink(missing_ok=True)
            os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
            return _connect(path)
    except (OSError, sqlite3.Error) as error:
        raise ConfigError(f"responses cannot be stored in {path} ({error}): give another folder") from None


def _connect(path: Path | str) -> sqlite3.Connection:
    connection = sqlite3.connect(path, timeout=_BUSY_SECONDS, isolation_level=None, check_same_thread=False)
    try:
        [[found]] = connection.execute("PRAGMA quick_check(1)").fetchall()
        if found != "ok":
            raise sqlite3.DatabaseError(found)
        for setting in ("journal_mode = WAL", "synchronous = NORMAL", "foreign_keys = ON", "secure_delete = ON"):
            connection.execute(f"PRAGMA {setting}")
        connection.executescript(_SCHEMA)
    except BaseException:
        connection.close()
        raise
    return connection
