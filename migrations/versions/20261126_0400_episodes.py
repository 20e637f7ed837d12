"""Episodes: attempts of agents at tasks, with their limits and their outcomes."""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

revision = "20261126_0400"
down_revision = "20261126_0200"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "episodes",
        sa.Column("id", sa.String(48), nullable=False),
        sa.Column("project_id", sa.String(48), nullable=False),
        sa.Column("policy_id", sa.String(48), nullable=False),
        sa.Column("key_id", sa.String(48), nullable=False),
        sa.Column("key_sha256", sa.String(64), nullable=False),
        sa.Column("task", sa.String(255), nullable=True),
        sa.Column("request_metadata", sa.JSON().with_variant(JSONB(), "postgresql"), nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("end_reason", sa.String(16), nullable=True),
        sa.Column("ended_at", sa.Float(), nullable=True),
        sa.Column("outcome", sa.Float(), nullable=True),
        sa.Column("end_fingerprint", sa.String(64), nullable=True),
        sa.Column("start_version_id", sa.String(48), nullable=True),
        sa.Column("idle_seconds", sa.Float(), nullable=False),
        sa.Column("deadline_at", sa.Float(), nullable=False),
        sa.Column("max_turns", sa.Integer(), nullable=True),
        sa.Column("max_tokens", sa.Integer(), nullable=True),
        sa.Column("idempotency_key", sa.String(255), nullable=True),
        sa.Column("fingerprint", sa.String(64), nullable=False),
        sa.Column("erased_at", sa.Float(), nullable=True),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.ForeignKeyConstraint(["project_id"], ["projects.id"], name="fk_episodes_project_id_projects"),
        sa.ForeignKeyConstraint(["policy_id"], ["policies.id"], name="fk_episodes_policy_id_policies"),
        sa.PrimaryKeyConstraint("id", name="pk_episodes"),
        sa.UniqueConstraint("key_sha256", name="uq_episodes_key_sha256"),
    )
    op.create_index("ix_episodes_project_id_created_at", "episodes", ["project_id", "created_at", "id"])
    has_key, is_open = sa.text("idempotency_key IS NOT NULL"), sa.text("state = 'open'")
    op.create_index(
        "ix_episodes_idempotency_key",
        "episodes",
        ["key_id", "idempotency_key"],
        unique=True,
        postgresql_where=has_key,
        sqlite_where=has_key,
    )
    op.create_index("ix_episodes_open", "episodes", ["deadline_at"], postgresql_where=is_open, sqlite_where=is_open)


def downgrade() -> None:
    op.drop_table("episodes")
