"""How much feedback a page has: as much as its rows allow, with the groups of episodes that are read for it."""

from tests.support.attempts import attempt
from tests.support.deployment import Harness
from workers.feedback.feedback_pages import PageSize, read_page


async def test_page_counts_the_turns_of_a_group_once(harness: Harness) -> None:
    """Two groups of two attempts with three turns each.

    An outcome reads its feedback, its turns and those of its group, 1 + 3 + 6 rows; the second of the group 4 more.
    """
    for number in range(2):
        for _ in range(2):
            await attempt(harness, 3, 1.0, group={"id": f"g{number}", "size": 2})
    sizes = [PageSize(10, 30), PageSize(10, 14, with_groups=True), PageSize(10, 13, with_groups=True)]
    async with harness.db.read() as session:
        pages = [await read_page(session, size) for size in sizes]
    assert [len(page.seqs) for page in pages] == [4, 2, 1]
