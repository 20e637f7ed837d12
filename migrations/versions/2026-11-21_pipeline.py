"""What turns are worth: judgements, raters, maturity; how a policy learns; what has been erased.

Revises: b0c6d2f4a7e1
Old code still runs while this does: what is new may be null or has a default. Turns from before are taken as looked at.
"""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "c41d7e9b2f60"
down_revision = "b0c6d2f4a7e1"
branch_labels = None
depends_on = None

JSON = sa.JSON().with_variant(postgresql.JSONB(astext_type=sa.Text()), "postgresql")


def upgrade() -> None:
    _judgements()
    _raters()
    _learning()
    _policies()
    _looked_at()


def _judgements() -> None:
    op.create_table(
        "judgements",
        sa.Column("id", sa.String(length=48), nullable=False),
        sa.Column("turn_id", sa.String(length=48), nullable=False),
        sa.Column("policy_id", sa.String(length=48), nullable=False),
        sa.Column("source", sa.String(length=63), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("due_at", sa.Float(), nullable=False),
        sa.Column("value", sa.Float(), nullable=True),
        sa.Column("details", JSON, nullable=False),
        sa.Column("reason", sa.Text(), nullable=True),
        sa.Column("settled_at", sa.Float(), nullable=True),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.Column("lease_owner", sa.String(length=128), nullable=True),
        sa.Column("lease_until", sa.Float(), nullable=True),
        sa.Column("heartbeat_at", sa.Float(), nullable=True),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("fence", sa.Integer(), nullable=False),
        sa.ForeignKeyConstraint(["policy_id"], ["policies.id"], name=op.f("fk_judgements_policy_id_policies")),
        sa.ForeignKeyConstraint(["turn_id"], ["turns.id"], name=op.f("fk_judgements_turn_id_turns")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_judgements")),
        sa.UniqueConstraint("turn_id", "source", name=op.f("uq_judgements_turn_id_source")),
    )
    op.create_index(
        "ix_judgements_due_at",
        "judgements",
        ["due_at"],
        postgresql_where=sa.text("state = 'open'"),
        sqlite_where=sa.text("state = 'open'"),
    )
    op.create_index("ix_judgements_policy_id_source_settled_at", "judgements", ["policy_id", "source", "settled_at"])


def _raters() -> None:
    op.create_table(
        "raters",
        sa.Column("project_id", sa.String(length=48), nullable=False),
        sa.Column("name", sa.String(length=320), nullable=False),
        sa.Column("standing", sa.String(length=16), nullable=False),
        sa.Column("reason", sa.Text(), nullable=True),
        sa.Column("num_up", sa.Integer(), nullable=False),
        sa.Column("num_down", sa.Integer(), nullable=False),
        sa.Column("agreed", sa.Float(), nullable=False),
        sa.Column("disagreed", sa.Float(), nullable=False),
        sa.Column("day", sa.Integer(), nullable=False),
        sa.Column("num_today", sa.Integer(), nullable=False),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.ForeignKeyConstraint(["project_id"], ["projects.id"], name=op.f("fk_raters_project_id_projects")),
        sa.PrimaryKeyConstraint("project_id", "name", name=op.f("pk_raters")),
    )
    op.create_index("ix_raters_project_id_standing", "raters", ["project_id", "standing"])


def _learning() -> None:
    op.add_column("rewards", sa.Column("origin", sa.String(length=63), nullable=False, server_default="explicit"))
    op.add_column("rewards", sa.Column("rater", sa.String(length=320), nullable=True))
    op.add_column("rewards", sa.Column("weight", sa.Float(), nullable=False, server_default="1"))
    op.add_column("samples", sa.Column("matures_at", sa.Float(), nullable=False, server_default="0"))
    op.add_column("samples", sa.Column("conversation_id", sa.String(length=255), nullable=True))
    op.add_column("samples", sa.Column("rater", sa.String(length=320), nullable=True))
    op.add_column("samples", sa.Column("cluster", sa.String(length=32), nullable=True))
    op.add_column("samples", sa.Column("group_id", sa.String(length=300), nullable=True))
    op.create_index(
        "ix_samples_policy_id_matures_at",
        "samples",
        ["policy_id", "matures_at"],
        postgresql_where=sa.text("state = 'open'"),
        sqlite_where=sa.text("state = 'open'"),
    )
    op.add_column("batches", sa.Column("num_raters", sa.Integer(), nullable=True))
    op.add_column("batches", sa.Column("claimed_at", sa.Float(), nullable=True))


def _policies() -> None:
    op.add_column("policies", sa.Column("rewards", JSON, nullable=True))
    op.add_column("policies", sa.Column("mode", sa.String(length=16), nullable=False, server_default="asynchronous"))
    op.add_column("policies", sa.Column("mode_reason", sa.Text(), nullable=True))
    op.add_column("policies", sa.Column("mode_since", sa.Float(), nullable=True))
    op.add_column("policies", sa.Column("alarms", sa.Integer(), nullable=False, server_default="0"))
    op.add_column("versions", sa.Column("erased_at", sa.Float(), nullable=True))
    op.create_index("ix_audit_project_id_action_subject", "audit", ["project_id", "action", "subject"])


def _looked_at() -> None:
    if op.get_bind().dialect.name == "postgresql":  # a default is kept with the table: no row is written
        op.add_column("turns", sa.Column("curated", sa.Boolean(), nullable=False, server_default=sa.true()))
        op.alter_column("turns", "curated", server_default=sa.false())
    else:
        op.add_column("turns", sa.Column("curated", sa.Boolean(), nullable=False, server_default=sa.false()))
        op.execute(sa.text("UPDATE turns SET curated = true WHERE state <> 'open'"))
    op.create_index(
        "ix_turns_finished_at",
        "turns",
        ["finished_at"],
        postgresql_where=sa.text("NOT curated"),
        sqlite_where=sa.text("NOT curated"),
    )
    op.drop_index("ix_feedback_curated", "feedback")
    op.create_index(
        "ix_feedback_curated",
        "feedback",
        ["seq"],
        postgresql_where=sa.text("NOT curated"),
        sqlite_where=sa.text("NOT curated"),
    )


def downgrade() -> None:
    op.drop_index("ix_feedback_curated", "feedback")
    op.create_index("ix_feedback_curated", "feedback", ["curated"])
    op.drop_index("ix_turns_finished_at", "turns")
    op.drop_column("turns", "curated")
    op.drop_column("versions", "erased_at")
    op.drop_index("ix_audit_project_id_action_subject", "audit")
    for column in ("alarms", "mode_since", "mode_reason", "mode", "rewards"):
        op.drop_column("policies", column)
    for column in ("claimed_at", "num_raters"):
        op.drop_column("batches", column)
    op.drop_index("ix_samples_policy_id_matures_at", "samples")
    for column in ("group_id", "cluster", "rater", "conversation_id", "matures_at"):
        op.drop_column("samples", column)
    for column in ("weight", "rater", "origin"):
        op.drop_column("rewards", column)
    op.drop_table("raters")
    op.drop_table("judgements")
