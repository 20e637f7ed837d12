"""Retention: a project's settings, pruned versions, emptied feedback, expired audit entries; indexes of large tables.

The indexes come first, because their creation commits (see `migrations.online`).
"""

from typing import Any

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

from migrations import online

revision = "20261123_0800"
down_revision = "20261123_0700"
branch_labels = None
depends_on = None
INDEXES: tuple[tuple[str, str, list[str], str | None], ...] = (
    ("ix_feedback_project_id_created_at", "feedback", ["project_id", "created_at"], "emptied_at IS NULL"),
    ("ix_turns_with_content", "turns", ["project_id", "created_at", "id"], "deleted_at IS NULL"),
    # So that pages which show the newest rows, or a version's ancestors, read no others.
    ("ix_samples_policy_id_created_at", "samples", ["policy_id", "created_at"], None),
    ("ix_batches_policy_id_created_at", "batches", ["policy_id", "created_at"], None),
    ("ix_rollouts_policy_id_created_at", "rollouts", ["policy_id", "created_at"], None),
    ("ix_versions_parent_id", "versions", ["parent_id"], None),
    ("ix_versions_tainted", "versions", ["policy_id"], "tainted_at IS NOT NULL"),
    ("ix_audit_project_id_seq", "audit", ["project_id", "seq"], None),
    ("ix_audit_events", "audit", ["project_id", "seq"], "action NOT IN ('token.created', 'feedback.withdrawn')"),
)
COLUMNS: tuple[tuple[str, str, Any, str | None], ...] = (
    ("projects", "retention", sa.JSON().with_variant(JSONB(), "postgresql"), None),
    ("versions", "pruned_at", sa.Float(), None),
    ("audit_chains", "start_number", sa.Integer(), "0"),
    ("audit_chains", "start_hash", sa.String(64), ""),
)
REFUSED = "audit entries cannot be changed or deleted"
# An entry may go if it is in the part of its chain that has expired; see app/privacy/retention.py.
IS_EXPIRED = """EXISTS (
    SELECT 1 FROM audit_chains WHERE audit_chains.project_id = OLD.project_id
    AND OLD.chain_number <= audit_chains.start_number
)"""


def upgrade() -> None:
    add_emptied_at()
    for name, table, columns, where in INDEXES:
        condition = None if where is None else sa.text(where)
        online.create_index(name, table, columns, postgresql_where=condition, sqlite_where=condition)
    for table, column, type_, default in COLUMNS:
        op.add_column(table, sa.Column(column, type_, nullable=default is None, server_default=default))
    allow_deletion(f"({IS_EXPIRED})")


def downgrade() -> None:
    for name, table, _, _ in reversed(INDEXES):  # this commits: what cannot be done twice comes after it
        online.drop_index(name, table)
    allow_deletion(None)
    for table, column, _, _ in reversed(COLUMNS):
        op.drop_column(table, column)
    op.drop_column("feedback", "emptied_at")


def add_emptied_at() -> None:
    """Add the column that an index needs; a second run after a kill finds it."""
    if op.get_bind().dialect.name == "postgresql":
        op.execute("ALTER TABLE feedback ADD COLUMN IF NOT EXISTS emptied_at DOUBLE PRECISION")
    else:
        op.add_column("feedback", sa.Column("emptied_at", sa.Float(), nullable=True))


def allow_deletion(condition: str | None) -> None:
    """Let the triggers of the audit log allow the deletion of the entries that meet the condition; None: of none."""
    if op.get_bind().dialect.name == "sqlite":
        op.execute("DROP TRIGGER audit_delete")
        when = f"WHEN NOT {condition}" if condition else ""
        op.execute(
            f"CREATE TRIGGER audit_delete BEFORE DELETE ON audit {when} BEGIN SELECT RAISE(ABORT, '{REFUSED}'); END"
        )
        return
    op.execute("DROP TRIGGER audit_row ON audit")
    op.execute(
        "CREATE TRIGGER audit_row BEFORE UPDATE ON audit FOR EACH ROW EXECUTE FUNCTION refuse_audit_change()"
        if condition
        else "CREATE TRIGGER audit_row BEFORE UPDATE OR DELETE ON audit "
        "FOR EACH ROW EXECUTE FUNCTION refuse_audit_change()"
    )
    if condition is None:
        op.execute("DROP TRIGGER audit_delete ON audit")
        op.execute("DROP FUNCTION refuse_audit_deletion")
        return
    op.execute(f"""
        CREATE FUNCTION refuse_audit_deletion() RETURNS trigger LANGUAGE plpgsql AS $$
        BEGIN
            IF {condition} THEN RETURN OLD; END IF;
            RAISE EXCEPTION '{REFUSED}';
        END $$
    """)
    op.execute(
        "CREATE TRIGGER audit_delete BEFORE DELETE ON audit FOR EACH ROW EXECUTE FUNCTION refuse_audit_deletion()"
    )
