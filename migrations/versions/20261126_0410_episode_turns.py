"""Turns name their episode, their step in it and the agent; feedback may be on an episode as a whole.

Expand only. The creation of the indexes commits (see `migrations.online`), so a second run after a kill finds the
columns.
"""

import sqlalchemy as sa
from alembic import op

from migrations import online

revision = "20261126_0410"
down_revision = "20261126_0400"
branch_labels = None
depends_on = None


def upgrade() -> None:
    if op.get_bind().dialect.name == "postgresql":
        op.execute("ALTER TABLE turns ADD COLUMN IF NOT EXISTS episode_id VARCHAR(48)")
        op.execute("ALTER TABLE turns ADD COLUMN IF NOT EXISTS episode_step INTEGER")
        op.execute("ALTER TABLE turns ADD COLUMN IF NOT EXISTS agent VARCHAR(63)")
        op.execute("ALTER TABLE feedback ADD COLUMN IF NOT EXISTS episode_id VARCHAR(48)")
    else:
        op.add_column("turns", sa.Column("episode_id", sa.String(48), nullable=True))
        op.add_column("turns", sa.Column("episode_step", sa.Integer(), nullable=True))
        op.add_column("turns", sa.Column("agent", sa.String(63), nullable=True))
        op.add_column("feedback", sa.Column("episode_id", sa.String(48), nullable=True))
    has_episode = sa.text("episode_id IS NOT NULL")
    options = {"postgresql_where": has_episode, "sqlite_where": has_episode}
    online.create_index("ix_turns_of_episode", "turns", ["episode_id", "episode_step"], **options)
    online.create_index("ix_feedback_of_episode", "feedback", ["project_id", "episode_id"], **options)


def downgrade() -> None:
    online.drop_index("ix_feedback_of_episode", "feedback")
    online.drop_index("ix_turns_of_episode", "turns")
    op.drop_column("feedback", "episode_id")
    op.drop_column("turns", "agent")
    op.drop_column("turns", "episode_step")
    op.drop_column("turns", "episode_id")
