"""Samples copy what the assembly reads of other tables, and looks that found nothing are recorded.

The assembly fills the columns of the samples that are there. The indexes come first, because their creation commits.
"""

import sqlalchemy as sa
from alembic import op

from migrations import online

revision = "20261125_0750"
down_revision = "20261125_0740"
branch_labels = None
depends_on = None
IS_OPEN = "state = 'open'"
INDEXES = (
    ("ix_samples_in_order", "samples", ["policy_id", "is_automated", "ready_at"], IS_OPEN),
    ("ix_samples_in_groups", "samples", ["policy_id", "group_id"], IS_OPEN),
    ("ix_samples_of_raters", "samples", ["policy_id", "rater"], IS_OPEN),
    ("ix_samples_policy_id_replied_at", "samples", ["policy_id", "replied_at"], IS_OPEN),
    ("ix_samples_policy_id_changed_at", "samples", ["policy_id", "changed_at"], IS_OPEN),
    ("ix_samples_unknown_origin", "samples", ["policy_id", "origin"], f"{IS_OPEN} AND origin IS NULL"),
    ("ix_samples_returned", "samples", ["policy_id"], f"{IS_OPEN} AND num_returns > 0"),
    ("ix_turns_chats_of_policy", "turns", ["policy_id", "created_at"], "origin = 'chat'"),
)
COLUMNS = (
    ("origin", sa.String(16), None),
    ("key_id", sa.String(48), None),
    ("replied_at", sa.Float(), "0"),
    ("is_automated", sa.Boolean(), "false"),
    ("changed_at", sa.Float(), "0"),
)


def upgrade() -> None:
    add_columns()
    for name, table, columns, where in INDEXES:
        condition = sa.text(where)
        online.create_index(name, table, columns, postgresql_where=condition, sqlite_where=condition)
    op.create_table(
        "assembly_looks",
        sa.Column("policy_id", sa.String(48), nullable=False),
        sa.Column("looked_at", sa.Float(), nullable=False),
        sa.Column("next_at", sa.Float(), nullable=False),
        sa.Column("conditions", sa.String(64), nullable=False),
        sa.ForeignKeyConstraint(["policy_id"], ["policies.id"], name="fk_assembly_looks_policy_id_policies"),
        sa.PrimaryKeyConstraint("policy_id", name="pk_assembly_looks"),
    )


def downgrade() -> None:
    for name, table, _, _ in reversed(INDEXES):  # this commits: what cannot be done twice comes after it
        online.drop_index(name, table)
    op.drop_table("assembly_looks")
    for name, _, _ in reversed(COLUMNS):
        op.drop_column("samples", name)


def add_columns() -> None:
    """Add the columns that the indexes need; a second run after a kill finds them."""
    is_postgresql = op.get_bind().dialect.name == "postgresql"
    for name, kind, default in COLUMNS:
        if is_postgresql:
            suffix = "" if default is None else f" DEFAULT {default} NOT NULL"
            sql_type = kind.compile(dialect=op.get_bind().dialect)
            op.execute(f"ALTER TABLE samples ADD COLUMN IF NOT EXISTS {name} {sql_type}{suffix}")
        else:
            server_default = None if default is None else sa.text("0")
            op.add_column("samples", sa.Column(name, kind, server_default=server_default, nullable=default is None))
