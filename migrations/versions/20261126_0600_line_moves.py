"""Moves of samples after a rollback or a return, which are finished in steps. Expand only."""

import sqlalchemy as sa
from alembic import op

revision = "20261126_0600"
down_revision = "20261126_0500"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "line_moves",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False, autoincrement=True),
        sa.Column("policy_id", sa.String(48), nullable=False),
        sa.Column("at_version_id", sa.String(48), nullable=False),
        sa.Column("to_version_id", sa.String(48), nullable=False),
        sa.Column("undone_from", sa.Integer(), nullable=False),
        sa.Column("undone_to", sa.Integer(), nullable=False),
        sa.Column("after_turn_id", sa.String(48), nullable=True),
        sa.Column("rejection", sa.Text(), nullable=True),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.ForeignKeyConstraint(["policy_id"], ["policies.id"], name="fk_line_moves_policy_id_policies"),
        sa.ForeignKeyConstraint(["at_version_id"], ["versions.id"], name="fk_line_moves_at_version_id_versions"),
        sa.ForeignKeyConstraint(["to_version_id"], ["versions.id"], name="fk_line_moves_to_version_id_versions"),
        sa.PrimaryKeyConstraint("id", name="pk_line_moves"),
        if_not_exists=True,
    )
    op.create_index("ix_line_moves_policy_id", "line_moves", ["policy_id"], if_not_exists=True)


def downgrade() -> None:
    op.drop_table("line_moves")
