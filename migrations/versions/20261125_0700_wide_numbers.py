"""The numbers of feedback and of audit entries have 64 bits: those of 32 are used up after two billion.

On PostgreSQL each table is rewritten once, and nobody can use it meanwhile. On SQLite integers have 64 bits already.
"""

import sqlalchemy as sa
from alembic import op

revision = "20261125_0700"
down_revision = "20261125_0600"
branch_labels = None
depends_on = None
COLUMNS = {  # those that count up by themselves come first
    "feedback": ("seq", "vote_total_id"),
    "audit": ("seq", "chain_number"),
    "vote_totals": ("id",),
    "feedback_ranks": ("feedback_seq",),
    "rewards": ("feedback_seq",),
    "reward_models": ("last_feedback_seq",),
    "raters": ("num_up", "num_down"),
    "vote_cursors": ("seq",),
    "audit_chains": ("number", "start_number"),
    "webhook_endpoints": ("last_chain_number",),
    "webhook_deliveries": ("audit_seq",),
}
SEQUENCES = {"feedback": "seq", "audit": "seq", "vote_totals": "id"}


def upgrade() -> None:
    _change_type("bigint")


def downgrade() -> None:
    """Fails where a number has more than 32 bits."""
    _change_type("integer")


def _change_type(name: str) -> None:
    connection = op.get_bind()
    if connection.dialect.name != "postgresql":
        return
    for table, columns in COLUMNS.items():
        changes = ", ".join(f"ALTER COLUMN {column} TYPE {name}" for column in columns)
        op.execute(f"ALTER TABLE {table} {changes}")
    for table, column in SEQUENCES.items():
        sequence = connection.scalar(
            sa.text("SELECT pg_get_serial_sequence(:table, :column)"), {"table": table, "column": column}
        )
        op.execute(f"ALTER SEQUENCE {sequence} AS {name}")
