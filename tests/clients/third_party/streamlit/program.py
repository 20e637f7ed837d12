"""Streamlit's own runner of apps, AppTest: what a page shows, and what a person presses."""

import os
from typing import Any

from streamlit.testing.v1 import AppTest
from ui_program import APP, QUESTIONS, read_votes, report

app = AppTest.from_file(str(APP), default_timeout=60).run()
for question in QUESTIONS:
    app.chat_input[0].set_value(question).run()
    assert not app.exception, app.exception
id = app.session_state["messages"][-1]["id"]
assert len(app.get("feedback")) == len(QUESTIONS)
assert os.environ["ATTUNE_API_KEY"] not in str(app), "the page knows no API key"


def press(value: int | None) -> list[list[Any]]:
    """Press a thumb, or, with None, the same once more. Return the votes that count then."""
    app.get("feedback")[-1].set_value(value).run()
    assert not app.exception, app.exception
    return read_votes(id)


up, down, taken_back, again = press(1), press(0), press(None), press(1)
stars = AppTest.from_string(
    f"from attune_client import Attune\nfrom attune_client.streamlit import feedback\n"
    f"feedback(Attune().feedback, {id!r}, options='stars', user='ada')"
)
stars.run().get("feedback")[0].set_value(3).run()
assert not stars.exception, stars.exception
report(id, up=up, down=down, taken_back=taken_back, again=again, stars=read_votes(id))
