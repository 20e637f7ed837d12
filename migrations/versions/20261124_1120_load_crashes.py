"""How often an engine has ended while it loaded a version."""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

revision = "20261124_1120"
down_revision = "20261124_1110"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the column."""
    kind = sa.JSON().with_variant(JSONB(), "postgresql")
    op.add_column("engines", sa.Column("load_crashes", kind, nullable=True))


def downgrade() -> None:
    """Drop the column."""
    op.drop_column("engines", "load_crashes")
