"""Engines say which server they are. Expand only: those that are registered without it are SGLang."""

import sqlalchemy as sa
from alembic import op

revision = "20261126_1400"
down_revision = "20261126_1300"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("engines", sa.Column("kind", sa.String(16), server_default="sglang", nullable=False))


def downgrade() -> None:
    op.drop_column("engines", "kind")
