"""Responses in SQLite, in memory or in a file that only this user can read."""

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
from typing import Any

from jaxis.errors import ConfigError
from jaxis.server.http.body import new_id

FILE = "responses.sqlite"
MAX_CHAIN = 10_000
"""Most responses that one may go back to."""
_BUSY_SECONDS = 5.0
_ROW_BYTES = 200  # of a row, beside its text
# In the order of tables: responses, the items of their requests, and the ids of the items in their bodies. `kind` is
# always "response": files of jaxis 0.1.0 may also hold conversations, which expire.
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
# An item by its id, in an owner's responses, or else in their requests.
_FIND_ITEM = """
SELECT said.value, held.id FROM output_item JOIN held ON held.id = response, json_each(held.body, '$.output') AS said
WHERE output_item.id = ? AND owner = ? AND used >= ? AND json_extract(said.value, '$.id') = output_item.id
UNION ALL
SELECT item.body, held.id FROM item JOIN held ON held.id = holder WHERE item.id = ? AND owner = ? AND used >= ?
LIMIT 1
"""
_logger = logging.getLogger(__name__)

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
    """Responses of owners, with the items of their requests. Every method may be called by any thread.

    A response is removed when it was not used for `ttl_seconds`, or when there is no room: the least recently used go
    first. Several servers may share a file.

    Args:
      folder: Folder of the file; None keeps all in memory.
      max_bytes: Most bytes of all responses, counted as text.
      ttl_seconds: Time that a response stays after its last use.
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

    def put(self, owner: str, response_id: str, body: Json, items: Sequence[Json], previous: str | None = None) -> None:
        """Adds a response, under a new id, with the items of its request, each with an `id`.

        `body` is all of it but the items; its `output` has items with an `id` each. `previous` is the response that it
        continues.
        """
        with self._transaction() as connection:
            text, texts = json.dumps(body), [json.dumps(item) for item in items]
            said = [(item["id"], response_id) for item in body["output"]]
            num_bytes = sum(len(each) + _ROW_BYTES for each in (text, *texts)) + _ROW_BYTES * len(said)
            row = (response_id, owner, previous, text, num_bytes, self._clock())
            connection.execute("INSERT INTO held VALUES (?, ?, 'response', ?, ?, ?, ?)", row)
            connection.executemany("INSERT INTO output_item VALUES (?, ?)", said)
            rows = [(response_id, item["id"], text) for item, text in zip(items, texts, strict=True)]
            connection.executemany("INSERT INTO item (holder, id, body) VALUES (?, ?, ?)", rows)
            self._make_room(connection)

    def get(self, owner: str, response_id: str) -> Json | None:
        """Returns a response without its items; None if this owner has no such response."""
        with self._transaction() as connection:
            return self._find(connection, owner, response_id)

    def chain(self, owner: str, response_id: str) -> list[tuple[Json, list[Json]]] | None:
        """Returns a response and its predecessors, the first one first, each with its items; None if one is gone."""
        found: list[tuple[Json, list[Json]]] = []
        following: str | None = response_id
        with self._transaction() as connection:
            while following is not None:
                body = self._find(connection, owner, following)
                if body is None or len(found) == MAX_CHAIN:
                    return None
                rows = connection.execute("SELECT body FROM item WHERE holder = ? ORDER BY place", (following,))
                found.append((body, [json.loads(text) for [text] in rows]))
                [following] = connection.execute("SELECT previous FROM held WHERE id = ?", (following,)).fetchone()
        return found[::-1]

    def delete(self, owner: str, response_id: str) -> bool:
        """Removes a response with its items; False if this owner has no such response."""
        with self._transaction() as connection:
            found = connection.execute("DELETE FROM held WHERE id = ? AND owner = ?", (response_id, owner))
            return found.rowcount == 1

    def page(self, owner: str, response_id: str, page: Page) -> tuple[list[Json], bool] | None:
        """Returns some items of a response's request, and whether more follow; None if this owner has no such response
        or item.
        """
        with self._transaction() as connection:
            if self._find(connection, owner, response_id) is None:
                return None
            order, beyond, place = ("DESC", "<", 1 << 62) if page.descending else ("ASC", ">", 0)
            if page.after is not None:
                select = "SELECT place FROM item WHERE holder = ? AND id = ?"
                if (row := connection.execute(select, (response_id, page.after)).fetchone()) is None:
                    return None
                [place] = row
            rows = connection.execute(
                f"SELECT body FROM item WHERE holder = ? AND place {beyond} ? ORDER BY place {order} LIMIT ?",
                (response_id, place, page.limit + 1),
            ).fetchall()
            return [json.loads(text) for [text] in rows[: page.limit]], len(rows) > page.limit

    def find_items(self, owner: str, item_ids: Iterable[str]) -> dict[str, Json]:
        """Finds items by their ids in this owner's responses and their requests."""
        found: dict[str, Json] = {}
        with self._transaction() as connection:
            for item_id in item_ids:
                values = (item_id, owner, self._clock() - self._ttl_seconds)
                if (row := connection.execute(_FIND_ITEM, values * 2).fetchone()) is not None:
                    found[item_id] = json.loads(row[0])
                    connection.execute("UPDATE held SET used = ? WHERE id = ?", (self._clock(), row[1]))
        return found

    def close(self) -> None:
        with self._lock:
            self._connection.close()

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._lock, self._connection:
            self._connection.execute("BEGIN IMMEDIATE")
            yield self._connection

    def _find(self, connection: sqlite3.Connection, owner: str, response_id: str) -> Json | None:
        """Returns a response, and marks it as used now."""
        now = self._clock()
        row = connection.execute(
            "SELECT body FROM held WHERE id = ? AND owner = ? AND kind = 'response' AND used >= ?",
            (response_id, owner, now - self._ttl_seconds),
        ).fetchone()
        if row is None:
            return None
        connection.execute("UPDATE held SET used = ? WHERE id = ?", (now, response_id))
        return json.loads(row[0])

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
