"""Corrections teach: samples with corrected texts, and why the text of a correction is not learned from.

Expand only. Corrections that were processed before count by their reward, as they did. The creation of the index
commits (see `migrations.online`), so a second run after a kill finds the columns.
"""

import sqlalchemy as sa
from alembic import op

from migrations import online

revision = "20261126_0200"
down_revision = "20261126_0100"
branch_labels = None
depends_on = None


def upgrade() -> None:
    if op.get_bind().dialect.name == "postgresql":
        op.execute("ALTER TABLE samples ADD COLUMN IF NOT EXISTS is_corrected BOOLEAN DEFAULT false NOT NULL")
        op.execute("ALTER TABLE feedback ADD COLUMN IF NOT EXISTS text_rule VARCHAR(32)")
    else:
        op.add_column("samples", sa.Column("is_corrected", sa.Boolean(), nullable=False, server_default=sa.false()))
        op.add_column("feedback", sa.Column("text_rule", sa.String(32), nullable=True))
    condition = sa.text("state = 'open'")
    online.create_index(
        "ix_samples_corrected",
        "samples",
        ["policy_id", "is_corrected"],
        postgresql_where=condition,
        sqlite_where=condition,
    )


def downgrade() -> None:
    online.drop_index("ix_samples_corrected", "samples")
    op.drop_column("feedback", "text_rule")
    op.drop_column("samples", "is_corrected")
