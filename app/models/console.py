"""ConsoleSession and ConsoleLink: who is signed in to the console, and the links that sign in once."""

from sqlalchemy import ForeignKey, String
from sqlalchemy.orm import Mapped, mapped_column

from app.models.base import Base, Created


class ConsoleSession(Created, Base):
    """A browser that signed in with an API key. Only the hash of its cookie is stored.

    It ends with its key: each request reads whether the key is still active.
    """

    __tablename__ = "console_sessions"

    token_sha256: Mapped[str] = mapped_column(String(64), primary_key=True)
    key_id: Mapped[str] = mapped_column(ForeignKey("api_keys.id"), index=True)
    csrf_token: Mapped[str] = mapped_column(String(64), doc="what each form of this session must send")
    notice: Mapped[str | None] = mapped_column(doc="what the last act did; the next page shows it once")
    last_seen_at: Mapped[float]
    expires_at: Mapped[float] = mapped_column(index=True)


class ConsoleLink(Created, Base):
    """A link that signs in once, as the API key that asked for it. Only the hash of its token is stored."""

    __tablename__ = "console_links"

    token_sha256: Mapped[str] = mapped_column(String(64), primary_key=True)
    key_id: Mapped[str] = mapped_column(ForeignKey("api_keys.id"))
    expires_at: Mapped[float]
