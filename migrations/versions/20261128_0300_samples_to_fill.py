"""An index of the samples whose columns are not known, in the order in which they are filled. Expand only.

ix_samples_unknown_origin stays: processes of an earlier release name it in their statements.
"""

import sqlalchemy as sa

from migrations import online

revision = "20261128_0300"
down_revision = "20261128_0200"
branch_labels = None
depends_on = None

NAME = "ix_samples_to_fill"


def upgrade() -> None:
    is_unknown = sa.text("state = 'open' AND origin IS NULL")
    columns = ["policy_id", "turn_id"]
    online.create_index(NAME, "samples", columns, postgresql_where=is_unknown, sqlite_where=is_unknown)


def downgrade() -> None:
    online.drop_index(NAME, "samples")
