"""Browser tokens are counted by minute and key; the audit has an entry for each count."""

import sqlalchemy as sa
from alembic import op

revision = "20261125_0710"
down_revision = "20261125_0700"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "token_counts",
        sa.Column("project_id", sa.String(48), nullable=False),
        sa.Column("actor", sa.String(128), nullable=False),
        sa.Column("minute", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("num_tokens", sa.Integer(), nullable=False),
        sa.ForeignKeyConstraint(["project_id"], ["projects.id"], name="fk_token_counts_project_id_projects"),
        sa.PrimaryKeyConstraint("project_id", "actor", "minute", name="pk_token_counts"),
    )
    op.create_index("ix_token_counts_minute", "token_counts", ["minute"])


def downgrade() -> None:
    op.drop_table("token_counts")
