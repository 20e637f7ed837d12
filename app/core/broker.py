"""The embedded broker: Celery's file-system transport, whose messages appear whole or not at all.

Kombu's own channel creates the file of a message and then writes it. A reader that polls in between takes an empty
message, and its worker fails.
"""

import os
import uuid
from pathlib import Path
from time import time_ns
from typing import Any

from kombu.transport import filesystem
from kombu.utils.encoding import str_to_bytes
from kombu.utils.json import dumps

MAX_QUEUED = 50  # messages that wait in one queue


class Channel(filesystem.Channel):
    def _put(self, queue: str, payload: Any, **options: Any) -> None:
        folder = Path(self.data_folder_out)
        if sum(name.endswith(f".{queue}.msg") for name in os.listdir(folder)) >= MAX_QUEUED:
            return  # no worker reads this queue; one that starts looks at the database first
        name = f"{time_ns()}_{uuid.uuid4()}.{queue}"
        (folder / f"{name}.new").write_bytes(str_to_bytes(dumps(payload)))
        os.rename(folder / f"{name}.new", folder / f"{name}.msg")


class Transport(filesystem.Transport):
    Channel = Channel
