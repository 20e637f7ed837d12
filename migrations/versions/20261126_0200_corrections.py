"""Corrections teach: samples that are learned from as pairs, and why the text of a correction is not learned from.

Expand only. Corrections that were processed before count by their reward, as they did.
"""

import sqlalchemy as sa
from alembic import op

revision = "20261126_0200"
down_revision = "20261125_0750"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("samples", sa.Column("is_pair", sa.Boolean(), nullable=False, server_default=sa.false()))
    op.add_column("feedback", sa.Column("text_rule", sa.String(32), nullable=True))


def downgrade() -> None:
    with op.batch_alter_table("feedback") as table:
        table.drop_column("text_rule")
    with op.batch_alter_table("samples") as table:
        table.drop_column("is_pair")
