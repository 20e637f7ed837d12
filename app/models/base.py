"""The base of every table: names of constraints, ids, creation times, and columns for arrays of numbers."""

import secrets
from array import array
from collections.abc import Sequence
from typing import Any

from sqlalchemy import JSON, Float, LargeBinary, MetaData
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.engine import Dialect
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column
from sqlalchemy.types import TypeDecorator

from app.core.database import now

Json = JSON().with_variant(JSONB(), "postgresql")


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


class Created:
    created_at: Mapped[float] = mapped_column(Float, default=now(), doc="seconds since the epoch, database clock")


class _Packed(TypeDecorator[list[Any]]):
    """A list of numbers stored as little-endian bytes: exact, and a tenth of its size as JSON."""

    impl = LargeBinary
    cache_ok = True
    typecode: str

    def process_bind_param(self, value: Sequence[Any] | None, dialect: Dialect) -> bytes | None:
        return None if value is None else array(self.typecode, value).tobytes()

    def process_result_value(self, value: bytes | None, dialect: Dialect) -> list[Any] | None:
        if value is None:
            return None
        numbers = array(self.typecode)
        numbers.frombytes(value)
        return numbers.tolist()


class TokenIds(_Packed):
    cache_ok = True
    typecode = "i"


class Logprobs(_Packed):
    cache_ok = True
    typecode = "f"  # the engine computes them in float32


def new_id(prefix: str) -> str:
    """Return a new random id of 128 bits. Example: new_id("fb") -> "fb-9f2c…"

    Ids of one prefix have one length: SGLang aborts requests by the beginning of their ids.
    """
    return f"{prefix}-{secrets.token_hex(16)}"
