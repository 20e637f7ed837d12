"""Full weights: which versions are, which engine has which, and whose weights said which tokens of a turn.

Revises: 5a1c7e90b3d2
Old code still runs while this does: what is new may be null or has a default. All versions from before are adapters.
"""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "c4d2a8f17b60"
down_revision = "5a1c7e90b3d2"
branch_labels = None
depends_on = None

JSON = sa.JSON().with_variant(postgresql.JSONB(astext_type=sa.Text()), "postgresql")


def upgrade() -> None:
    op.add_column("versions", sa.Column("full", sa.Boolean(), server_default=sa.false(), nullable=False))
    op.add_column("engines", sa.Column("weights", sa.String(length=80), nullable=True))
    op.add_column("engines", sa.Column("moving_until", sa.Float(), nullable=True))
    op.add_column("turns", sa.Column("weight_versions", JSON, nullable=True))


def downgrade() -> None:
    op.drop_column("turns", "weight_versions")
    op.drop_column("engines", "moving_until")
    op.drop_column("engines", "weights")
    op.drop_column("versions", "full")
