"""Totals of settled votes and rollouts. The reconciler counts the rows that are there, step after step.

The indexes come first, because their creation commits (see `migrations.online`).
"""

import sqlalchemy as sa
from alembic import op

from migrations import online

revision = "20261124_1100"
down_revision = "20261124_1000"
branch_labels = None
depends_on = None
IS_UNCOUNTED_VOTE = "vote_total_id IS NULL AND kind NOT IN ('comment', 'withdrawal')"
VERSION_INDEXES = (  # so that the reconciler reads neither all versions that were live nor all that have no files
    ("ix_versions_policy_id_live_at", "live_at", "live_at IS NOT NULL"),
    ("ix_versions_with_files", "number", "adapter_path IS NOT NULL AND pruned_at IS NULL"),
)


def upgrade() -> None:
    add_columns()
    is_uncounted = sa.text(IS_UNCOUNTED_VOTE)
    online.create_index(
        "ix_feedback_uncounted_votes",
        "feedback",
        ["project_id", "seq"],
        postgresql_where=is_uncounted,
        sqlite_where=is_uncounted,
    )
    online.create_index(
        "ix_rollouts_uncounted",
        "rollouts",
        ["policy_id"],
        postgresql_where=sa.text("NOT counted"),
        sqlite_where=sa.text("counted = 0"),
    )
    for name, column, where in VERSION_INDEXES:
        condition = sa.text(where)
        online.create_index(name, "versions", ["policy_id", column], postgresql_where=condition, sqlite_where=condition)
    op.create_table(
        "vote_totals",
        sa.Column("id", sa.Integer(), autoincrement=True, nullable=False),
        sa.Column("policy_id", sa.String(48), nullable=False),
        sa.Column("reason", sa.String(32), nullable=False),
        sa.Column("is_person", sa.Boolean(), nullable=False),
        sa.Column("num_votes", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.ForeignKeyConstraint(["policy_id"], ["policies.id"], name="fk_vote_totals_policy_id_policies"),
        sa.PrimaryKeyConstraint("id", name="pk_vote_totals"),
        sa.UniqueConstraint("policy_id", "reason", "is_person", name="uq_vote_totals_policy_id_reason_is_person"),
    )
    op.create_table(
        "vote_cursors",
        sa.Column("project_id", sa.String(48), nullable=False),
        sa.Column("seq", sa.Integer(), nullable=False),
        sa.ForeignKeyConstraint(["project_id"], ["projects.id"], name="fk_vote_cursors_project_id_projects"),
        sa.PrimaryKeyConstraint("project_id", name="pk_vote_cursors"),
    )
    op.create_table(
        "rollout_totals",
        sa.Column("policy_id", sa.String(48), nullable=False),
        sa.Column("origin", sa.String(16), nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("num_rollouts", sa.BigInteger(), nullable=False),
        sa.Column("tokens", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(["policy_id"], ["policies.id"], name="fk_rollout_totals_policy_id_policies"),
        sa.PrimaryKeyConstraint("policy_id", "origin", "state", name="pk_rollout_totals"),
    )


def downgrade() -> None:
    for name, _, _ in VERSION_INDEXES:  # this commits: what cannot be done twice comes after it
        online.drop_index(name, "versions")
    online.drop_index("ix_rollouts_uncounted", "rollouts")
    online.drop_index("ix_feedback_uncounted_votes", "feedback")
    for table in ("rollout_totals", "vote_cursors", "vote_totals"):
        op.drop_table(table)
    op.drop_column("rollouts", "counted")
    op.drop_column("feedback", "vote_total_id")


def add_columns() -> None:
    """Add the columns that the indexes need; a second run after a kill finds them."""
    if op.get_bind().dialect.name == "postgresql":
        op.execute("ALTER TABLE feedback ADD COLUMN IF NOT EXISTS vote_total_id INTEGER")
        op.execute("ALTER TABLE rollouts ADD COLUMN IF NOT EXISTS counted BOOLEAN DEFAULT false NOT NULL")
    else:
        op.add_column("feedback", sa.Column("vote_total_id", sa.Integer(), nullable=True))
        op.add_column("rollouts", sa.Column("counted", sa.Boolean(), server_default=sa.text("0"), nullable=False))
