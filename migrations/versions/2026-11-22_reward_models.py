"""Reward models: a learned head, its states and what it was fitted on.

Revises: c41d7e9b2f60
Two new tables; nothing that is there changes.
"""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "d50e1a7c3b21"
down_revision = "c41d7e9b2f60"
branch_labels = None
depends_on = None

JSON = sa.JSON().with_variant(postgresql.JSONB(astext_type=sa.Text()), "postgresql")


def upgrade() -> None:
    op.create_table(
        "reward_models",
        sa.Column("id", sa.String(length=48), nullable=False),
        sa.Column("policy_id", sa.String(length=48), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("actor", sa.String(length=128), nullable=False),
        sa.Column("reason", sa.Text(), nullable=True),
        sa.Column("serves", sa.Boolean(), nullable=False),
        sa.Column("path", sa.Text(), nullable=True),
        sa.Column("manifest_sha256", sa.String(length=64), nullable=True),
        sa.Column("metrics", JSON, nullable=False),
        sa.Column("num_pairs", sa.Integer(), nullable=True),
        sa.Column("num_thumbs", sa.Integer(), nullable=True),
        sa.Column("num_raters", sa.Integer(), nullable=True),
        sa.Column("feedback_seq", sa.Integer(), nullable=False),
        sa.Column("read_at", sa.Float(), nullable=True),
        sa.Column("settled_at", sa.Float(), nullable=True),
        sa.Column("served_at", sa.Float(), nullable=True),
        sa.Column("erased_at", sa.Float(), nullable=True),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.Column("lease_owner", sa.String(length=128), nullable=True),
        sa.Column("lease_until", sa.Float(), nullable=True),
        sa.Column("heartbeat_at", sa.Float(), nullable=True),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("fence", sa.Integer(), nullable=False),
        sa.ForeignKeyConstraint(["policy_id"], ["policies.id"], name=op.f("fk_reward_models_policy_id_policies")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_reward_models")),
        sa.UniqueConstraint("policy_id", "number", name=op.f("uq_reward_models_policy_id_number")),
    )
    for state in ("open", "serving"):
        alone = sa.text(f"state = '{state}'")
        op.create_index(
            f"ix_reward_models_{state}",
            "reward_models",
            ["policy_id"],
            unique=True,
            postgresql_where=alone,
            sqlite_where=alone,
        )
    op.create_table(
        "reward_model_turns",
        sa.Column("reward_model_id", sa.String(length=48), nullable=False),
        sa.Column("turn_id", sa.String(length=48), nullable=False),
        sa.ForeignKeyConstraint(
            ["reward_model_id"],
            ["reward_models.id"],
            name=op.f("fk_reward_model_turns_reward_model_id_reward_models"),
            ondelete="CASCADE",
        ),
        sa.ForeignKeyConstraint(["turn_id"], ["turns.id"], name=op.f("fk_reward_model_turns_turn_id_turns")),
        sa.PrimaryKeyConstraint("reward_model_id", "turn_id", name=op.f("pk_reward_model_turns")),
    )
    op.create_index("ix_reward_model_turns_turn_id", "reward_model_turns", ["turn_id"])


def downgrade() -> None:
    op.drop_table("reward_model_turns")
    op.drop_table("reward_models")
