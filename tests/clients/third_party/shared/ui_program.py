"""What the programs of Python user interfaces share: the app of docs/connect, and what its votes have become.

A program runs the app, asks two questions, and presses the thumbs of the second reply as people do. It calls `report`
with the votes on that reply after each press.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

from attune_client import Attune

APP = Path(os.environ["ATTUNE_TEST_APP"])
QUESTIONS = ("When are you open on Friday?", "And on Saturday?")
client = Attune()


def read_votes(completion_id: str) -> list[list[Any]]:
    """Return the kind, the value and the source of the votes on a reply that count."""
    page = client.feedback.find(completion_id)["data"]
    return [[vote["kind"], vote["value"], vote["source"]["id"]] for vote in page if vote["effective"]]


def report(completion_id: str, **steps: list[list[Any]]) -> None:
    """Print the votes after each step, and end the program."""
    print("\n" + json.dumps({"completion_id": completion_id, "votes": steps}), flush=True)
    sys.stderr.flush()
    os._exit(0)  # a server may run in a thread
