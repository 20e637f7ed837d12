"""Idempotency keys of admin requests."""

import sqlalchemy as sa
from alembic import op

revision = "20261124_1000"
down_revision = "20261123_0900"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Create the table."""
    op.create_table(
        "idempotent_requests",
        sa.Column("project_id", sa.String(48), nullable=False),
        sa.Column("key", sa.String(255), nullable=False),
        sa.Column("request_id", sa.String(48), nullable=False),
        sa.Column("fingerprint", sa.String(64), nullable=False),
        sa.Column("status", sa.Integer(), nullable=True),
        sa.Column("response", sa.Text(), nullable=True),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.ForeignKeyConstraint(["project_id"], ["projects.id"], name="fk_idempotent_requests_project_id_projects"),
        sa.PrimaryKeyConstraint("project_id", "key", name="pk_idempotent_requests"),
    )
    op.create_index("ix_idempotent_requests_project_id_created_at", "idempotent_requests", ["project_id", "created_at"])


def downgrade() -> None:
    """Drop the table."""
    op.drop_table("idempotent_requests")
