"""Samples whose reward does not include the feedback on their turns: that feedback is not learned from.

Expand only: a new column with a default.
"""

import sqlalchemy as sa
from alembic import op

revision = "20261123_0600"
down_revision = "20261123_0500"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("samples", sa.Column("uses_feedback", sa.Boolean(), nullable=False, server_default=sa.true()))


def downgrade() -> None:
    with op.batch_alter_table("samples") as table:
        table.drop_column("uses_feedback")
