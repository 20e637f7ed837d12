"""Totals of samples that wait, an index to see whether their rewards differ, and when they were last seen not to.

The reconciler counts the samples that are there, step after step. The indexes come first, because their creation
commits (see `migrations.online`).
"""

import sqlalchemy as sa
from alembic import op

from migrations import online

revision = "20261126_0100"
down_revision = "20261125_0750"
branch_labels = None
depends_on = None
IS_MISCOUNTED = (
    "CASE WHEN counted_state <> state AND (state IN ('open', 'quarantined') OR counted_state <> '') "
    "THEN 1 ELSE 0 END = 1"
)
INDEXES = (
    ("ix_samples_miscounted", ["policy_id", "changed_at"], IS_MISCOUNTED),
    ("ix_samples_policy_id_reward", ["policy_id", "reward"], "state = 'open'"),
)


def upgrade() -> None:
    if op.get_bind().dialect.name == "postgresql":  # a second run after a kill finds the columns
        op.execute("ALTER TABLE samples ADD COLUMN IF NOT EXISTS counted_state VARCHAR(16) DEFAULT '' NOT NULL")
        op.execute("ALTER TABLE assembly_looks ADD COLUMN IF NOT EXISTS no_contrast_at DOUBLE PRECISION")
    else:
        column = sa.Column("counted_state", sa.String(16), server_default=sa.text("''"), nullable=False)
        op.add_column("samples", column)
        op.add_column("assembly_looks", sa.Column("no_contrast_at", sa.Float(), nullable=True))
    for name, columns, where in INDEXES:
        condition = sa.text(where)
        online.create_index(name, "samples", columns, postgresql_where=condition, sqlite_where=condition)
    op.create_table(
        "sample_totals",
        sa.Column("policy_id", sa.String(48), nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("num_samples", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(["policy_id"], ["policies.id"], name="fk_sample_totals_policy_id_policies"),
        sa.PrimaryKeyConstraint("policy_id", "state", name="pk_sample_totals"),
    )


def downgrade() -> None:
    for name, _, _ in reversed(INDEXES):  # this commits: what cannot be done twice comes after it
        online.drop_index(name, "samples")
    op.drop_table("sample_totals")
    op.drop_column("assembly_looks", "no_contrast_at")
    op.drop_column("samples", "counted_state")
