"""Keys of feedback: what a sender calls its feedback, which new content under the same key replaces. Expand only."""

import sqlalchemy as sa
from alembic import op

revision = "20261126_0500"
down_revision = "20261126_0410"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "feedback_keys",
        sa.Column("project_id", sa.String(48), sa.ForeignKey("projects.id"), nullable=False),
        sa.Column("key", sa.String(255), nullable=False),
        sa.Column("feedback_id", sa.String(48), nullable=True),
        sa.Column("sent_at", sa.Float(), nullable=True),
        sa.Column("revision", sa.Integer(), nullable=False),
        sa.PrimaryKeyConstraint("project_id", "key", name="pk_feedback_keys"),
        if_not_exists=True,
    )
    op.create_index(
        "ix_feedback_keys_feedback_id",
        "feedback_keys",
        ["feedback_id"],
        if_not_exists=True,
    )


def downgrade() -> None:
    op.drop_table("feedback_keys")
