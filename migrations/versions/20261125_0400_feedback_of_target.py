"""One look into an index finds what has replaced or withdrawn feedback, however much its target has."""

import sqlalchemy as sa
from alembic import op

from migrations import online

revision = "20261125_0400"
down_revision = "20261125_0330"
branch_labels = None
depends_on = None
OF_TARGET = ["project_id", "target", "source_kind", "source_id", "name", "seq"]
IS_WITHDRAWAL = sa.text("withdraws IS NOT NULL")


def upgrade() -> None:
    columns = {column["name"] for column in sa.inspect(op.get_bind()).get_columns("feedback")}
    if "withdraws" not in columns:  # the steps that follow commit: this one may have been done before
        op.add_column("feedback", sa.Column("withdraws", sa.String(48), nullable=True))
    is_json = op.get_bind().dialect.name == "postgresql"
    id = "request_metadata ->> 'withdraws'" if is_json else "json_extract(request_metadata, '$.withdraws')"
    is_unfilled = f"kind = 'withdrawal' AND withdraws IS NULL AND {id} IS NOT NULL"
    online.backfill("feedback", f"withdraws = {id}", is_unfilled, key="seq")
    online.create_index("ix_feedback_of_target", "feedback", OF_TARGET)
    online.create_index(
        "ix_feedback_withdraws",
        "feedback",
        ["project_id", "withdraws"],
        postgresql_where=IS_WITHDRAWAL,
        sqlite_where=IS_WITHDRAWAL,
    )
    online.drop_index("ix_feedback_project_id_target", "feedback")  # the beginning of the one above


def downgrade() -> None:
    online.create_index("ix_feedback_project_id_target", "feedback", ["project_id", "target"])
    for name in ("ix_feedback_withdraws", "ix_feedback_of_target"):
        online.drop_index(name, "feedback")
    op.drop_column("feedback", "withdraws")
