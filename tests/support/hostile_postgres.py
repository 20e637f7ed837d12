"""A PostgreSQL whose rows come in unusual orders, for ATTUNE_SHUFFLE (`tests.support.shuffle`)."""

import os
import random
import secrets
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import psycopg
from sqlalchemy import event
from sqlalchemy.engine import Engine
from sqlalchemy.engine.interfaces import DBAPIConnection

SEED = os.environ.get("ATTUNE_SHUFFLE", "")
if SEED == "1":
    SEED = os.environ["ATTUNE_SHUFFLE"] = str(secrets.randbelow(10**6) + 2)  # the other processes of the run inherit it
VACUUM_SECONDS = 0.1
# Ways to find, join and group rows; each connection has a random half of them.
WAYS = ("seqscan", "indexscan", "bitmapscan", "hashagg", "hashjoin", "mergejoin", "nestloop")


@contextmanager
def hostile_postgres(url: str) -> Iterator[None]:
    """Let PostgreSQL return unordered rows in unusual orders until the block ends.

    Vacuum frees the places of deleted rows all the time, so that new rows are put among older ones; and each
    connection of this process finds, joins and groups rows in ways of its own.
    """
    if not SEED:
        yield
        return
    rng, ends = random.Random(SEED), threading.Event()

    def choose_ways(connection: DBAPIConnection, record: object) -> None:
        if "psycopg" in type(connection).__module__:
            cursor = connection.cursor()
            for way in rng.sample(WAYS, len(WAYS) // 2):
                cursor.execute(f"SET enable_{way} = off")
            cursor.close()
            connection.commit()

    def vacuum() -> None:
        with psycopg.connect(url.replace("+psycopg", ""), autocommit=True) as server:
            while not ends.wait(VACUUM_SECONDS):
                server.execute("VACUUM (TRUNCATE off, SKIP_LOCKED)")

    thread = threading.Thread(target=vacuum, name="vacuum")
    thread.start()
    event.listen(Engine, "connect", choose_ways)
    try:
        yield
    finally:
        event.remove(Engine, "connect", choose_ways)
        ends.set()
        thread.join()
