"""The base of every table: names of constraints, types of columns, ids, creation times and partial indexes."""

import secrets
from array import array
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from sqlalchemy import JSON, BigInteger, Float, Index, Integer, LargeBinary, MetaData, String, Text, text
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.engine import Dialect
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column
from sqlalchemy.types import TypeDecorator

from app.core.database import now

Json = JSON().with_variant(JSONB(), "postgresql")
# Numbers that are never used again, or count what ever happened. SQLite's integers have 64 bits anyway, and its BIGINT
# would not count up by itself.
BigInt = BigInteger().with_variant(Integer(), "sqlite")


class Base(DeclarativeBase):
    metadata = MetaData(
        naming_convention={
            "ix": "ix_%(table_name)s_%(column_0_N_name)s",
            "uq": "uq_%(table_name)s_%(column_0_N_name)s",
            "ck": "ck_%(table_name)s_%(constraint_name)s",
            "fk": "fk_%(table_name)s_%(column_0_N_name)s_%(referred_table_name)s",
            "pk": "pk_%(table_name)s",
        }
    )
    type_annotation_map: ClassVar[Mapping[Any, Any]] = {
        float: Float,
        str: Text,
        **dict.fromkeys(
            (
                list[str],
                list[dict[str, object]],
                dict[str, object],
                dict[str, object],
                dict[str, str],
                dict[str, float],
            ),
            Json,
        ),
    }


class Created:
    created_at: Mapped[float] = mapped_column(default=now(), doc="seconds since the epoch, database clock")


class Entity(Created):
    """A row with an id of its own; see `new_id`."""

    id: Mapped[str] = mapped_column(String(48), primary_key=True, sort_order=-1)


def partial_index(name: str, *columns: str, where: str, unique: bool = False) -> Index:
    """Return an index of the rows that satisfy the condition `where`."""
    condition = text(where)
    return Index(name, *columns, unique=unique, postgresql_where=condition, sqlite_where=condition)


class PackedNumbers(TypeDecorator[list[Any]]):
    """A list of numbers stored as little-endian bytes: exact, and a tenth of its size as JSON.

    `typecode` is that of Python's `array`.
    """

    impl = LargeBinary
    cache_ok = True

    def __init__(self, typecode: str) -> None:
        super().__init__()
        self.typecode = typecode

    def process_bind_param(self, value: Sequence[Any] | None, dialect: Dialect) -> bytes | None:
        return None if value is None else array(self.typecode, value).tobytes()

    def process_result_value(self, value: bytes | None, dialect: Dialect) -> list[Any] | None:
        return None if value is None else array(self.typecode, value).tolist()


TokenIds = PackedNumbers("i")
Logprobs = PackedNumbers("f")  # the engine computes them in float32


def new_id(prefix: str) -> str:
    """Return a new random id of 128 bits. Example: new_id("fb") -> "fb-9f2c…"

    Ids of one prefix have one length: SGLang aborts requests by the beginning of their ids.
    """
    return f"{prefix}-{secrets.token_hex(16)}"
