"""Rollouts: replies sampled off the hot path, beside chats and from prompt sets.

Revises: d50e1a7c3b21
Old code still runs while this does: what is new may be null or has a default. All turns from before are chats.
"""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "e61f2b8d4c32"
down_revision = "d50e1a7c3b21"
branch_labels = None
depends_on = None

JSON = sa.JSON().with_variant(postgresql.JSONB(astext_type=sa.Text()), "postgresql")


def upgrade() -> None:
    op.add_column("turns", sa.Column("origin", sa.String(length=16), server_default="chat", nullable=False))
    op.add_column("policies", sa.Column("rollouts", JSON, nullable=True))
    _plans()
    _rollouts()


def _plans() -> None:
    op.create_table(
        "rollout_plans",
        sa.Column("id", sa.String(length=48), nullable=False),
        sa.Column("project_id", sa.String(length=48), nullable=False),
        sa.Column("policy_id", sa.String(length=48), nullable=False),
        sa.Column("dataset_id", sa.String(length=48), nullable=False),
        sa.Column("dataset", sa.String(length=63), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("reason", sa.Text(), nullable=True),
        sa.Column("n", sa.Integer(), nullable=False),
        sa.Column("passes", sa.Integer(), nullable=False),
        sa.Column("verifier", JSON, nullable=False),
        sa.Column("temperature", sa.Float(), nullable=False),
        sa.Column("max_tokens", sa.Integer(), nullable=False),
        sa.Column("prompts_per_version", sa.Integer(), nullable=True),
        sa.Column("num_prompts", sa.Integer(), nullable=False),
        sa.Column("pass_number", sa.Integer(), nullable=False),
        sa.Column("position", sa.Integer(), nullable=False),
        sa.Column("version_id", sa.String(length=48), nullable=True),
        sa.Column("version_prompts", sa.Integer(), nullable=False),
        sa.Column("settled_at", sa.Float(), nullable=True),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.ForeignKeyConstraint(["policy_id"], ["policies.id"], name=op.f("fk_rollout_plans_policy_id_policies")),
        sa.ForeignKeyConstraint(["project_id"], ["projects.id"], name=op.f("fk_rollout_plans_project_id_projects")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_rollout_plans")),
    )
    op.create_index("ix_rollout_plans_policy_id_created_at", "rollout_plans", ["policy_id", "created_at"])


def _rollouts() -> None:
    op.create_table(
        "rollouts",
        sa.Column("id", sa.String(length=48), nullable=False),
        sa.Column("policy_id", sa.String(length=48), nullable=False),
        sa.Column("origin", sa.String(length=16), nullable=False),
        sa.Column("plan_id", sa.String(length=48), nullable=True),
        sa.Column("pass_number", sa.Integer(), nullable=True),
        sa.Column("number", sa.Integer(), nullable=True),
        sa.Column("choice_index", sa.Integer(), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("engine", sa.String(length=63), nullable=True),
        sa.Column("due_at", sa.Float(), nullable=False),
        sa.Column("expires_at", sa.Float(), nullable=False),
        sa.Column("tokens", sa.Integer(), server_default=sa.text("0"), nullable=False),
        sa.Column("seconds", sa.Float(), nullable=True),
        sa.Column("reward", sa.Float(), nullable=True),
        sa.Column("reason", sa.Text(), nullable=True),
        sa.Column("settled_at", sa.Float(), nullable=True),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.Column("lease_owner", sa.String(length=128), nullable=True),
        sa.Column("lease_until", sa.Float(), nullable=True),
        sa.Column("heartbeat_at", sa.Float(), nullable=True),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("fence", sa.Integer(), nullable=False),
        sa.ForeignKeyConstraint(["id"], ["turns.id"], name=op.f("fk_rollouts_id_turns")),
        sa.ForeignKeyConstraint(["plan_id"], ["rollout_plans.id"], name=op.f("fk_rollouts_plan_id_rollout_plans")),
        sa.ForeignKeyConstraint(["policy_id"], ["policies.id"], name=op.f("fk_rollouts_policy_id_policies")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_rollouts")),
        sa.UniqueConstraint(
            "plan_id",
            "pass_number",
            "number",
            "choice_index",
            name=op.f("uq_rollouts_plan_id_pass_number_number_choice_index"),
        ),
    )
    op.create_index(
        "ix_rollouts_due_at",
        "rollouts",
        ["due_at"],
        postgresql_where=sa.text("state = 'open'"),
        sqlite_where=sa.text("state = 'open'"),
    )
    op.create_index("ix_rollouts_policy_id_origin_settled_at", "rollouts", ["policy_id", "origin", "settled_at"])


def downgrade() -> None:
    """Rollouts are no chats: their turns, and all that hangs on them, do not stay behind as such."""
    op.drop_table("rollouts")
    op.drop_table("rollout_plans")
    theirs = "IN (SELECT id FROM turns WHERE origin IN ('shadow', 'prompt_set'))"
    for table in ("judgements", "rewards", "samples", "turn_pairs"):
        op.execute(f"DELETE FROM {table} WHERE turn_id {theirs}")
    op.execute("DELETE FROM turns WHERE origin IN ('shadow', 'prompt_set')")
    op.drop_column("policies", "rollouts")
    op.drop_column("turns", "origin")
