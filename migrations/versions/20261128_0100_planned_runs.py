"""Planned runs of environments, and their attempts with leases. Expand only."""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

revision = "20261128_0100"
down_revision = "20261127_0740"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "planned_runs",
        sa.Column("id", sa.String(48), nullable=False),
        sa.Column("project_id", sa.String(48), nullable=False),
        sa.Column("policy_id", sa.String(48), nullable=False),
        sa.Column("name", sa.String(63), nullable=False),
        sa.Column("plan", sa.JSON().with_variant(JSONB(), "postgresql"), nullable=False),
        sa.Column("num_tasks", sa.Integer(), nullable=False),
        sa.Column("num_added", sa.Integer(), nullable=False),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.ForeignKeyConstraint(["project_id"], ["projects.id"], name="fk_planned_runs_project_id_projects"),
        sa.ForeignKeyConstraint(["policy_id"], ["policies.id"], name="fk_planned_runs_policy_id_policies"),
        sa.PrimaryKeyConstraint("id", name="pk_planned_runs"),
        sa.UniqueConstraint("project_id", "name", name="uq_planned_runs_project_id_name"),
    )
    op.create_table(
        "run_attempts",
        sa.Column("id", sa.String(48), nullable=False),
        sa.Column("run_id", sa.String(48), nullable=False),
        sa.Column("task_index", sa.Integer(), nullable=False),
        sa.Column("attempt_index", sa.Integer(), nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("reason", sa.String(16), nullable=True),
        sa.Column("episode_id", sa.String(48), nullable=True),
        sa.Column("task_sha256", sa.String(64), nullable=True),
        sa.Column("num_failed", sa.Integer(), nullable=False),
        sa.Column("num_expired", sa.Integer(), nullable=False),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.Column("lease_owner", sa.String(128), nullable=True),
        sa.Column("lease_until", sa.Float(), nullable=True),
        sa.Column("heartbeat_at", sa.Float(), nullable=True),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("fence", sa.Integer(), nullable=False),
        sa.ForeignKeyConstraint(["run_id"], ["planned_runs.id"], name="fk_run_attempts_run_id_planned_runs"),
        sa.PrimaryKeyConstraint("id", name="pk_run_attempts"),
        sa.UniqueConstraint(
            "run_id", "task_index", "attempt_index", name="uq_run_attempts_run_id_task_index_attempt_index"
        ),
    )
    is_open = sa.text("state = 'open'")
    op.create_index(
        "ix_run_attempts_open",
        "run_attempts",
        ["run_id", "task_index", "attempt_index"],
        postgresql_where=is_open,
        sqlite_where=is_open,
    )


def downgrade() -> None:
    op.drop_table("run_attempts")
    op.drop_table("planned_runs")
