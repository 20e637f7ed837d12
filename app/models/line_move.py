"""Moves of samples that are not finished: the head has moved to another line, and the samples follow in steps."""

from sqlalchemy import ForeignKey, String
from sqlalchemy.orm import Mapped, mapped_column

from app.models.base import Base, BigInt, Created


class LineMove(Created, Base):
    """A way of a policy's samples from one version to another. The moves of a policy follow each other by `id`.

    Each step moves `at_version_id` along the way and is one transaction. The row is deleted at the end of the way.
    """

    __tablename__ = "line_moves"

    id: Mapped[int] = mapped_column(BigInt, primary_key=True, autoincrement=True)
    policy_id: Mapped[str] = mapped_column(ForeignKey("policies.id"), index=True)
    at_version_id: Mapped[str] = mapped_column(
        ForeignKey("versions.id"), doc="the version in whose line the samples were learned from, as they are now"
    )
    to_version_id: Mapped[str] = mapped_column(ForeignKey("versions.id"))
    undone_from: Mapped[int] = mapped_column(
        doc="the number of the first version that gives its samples back yet, and of those between it and `undone_to`"
    )
    undone_to: Mapped[int] = mapped_column(doc="the number of the last such version; smaller if there is none any more")
    after_turn_id: Mapped[str | None] = mapped_column(
        String(48), doc="the last turn that was taken back, of a batch that is larger than a step"
    )
    rejection: Mapped[str | None] = mapped_column(
        doc="why a version was rejected, whose samples return although nobody has judged it; null for other moves"
    )
