"""What connectors/openwebui needs of Open WebUI: a table of rows in place of its database, and modules to import."""

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from app.core.settings import REPOSITORY

PLUGIN = REPOSITORY / "connectors" / "openwebui" / "attune_openwebui.py"
USER = "67a9"


@dataclass
class OpenWebUI:
    """The rows of Open WebUI's feedback, and the function's view of them. `clock` is in seconds, as their times are."""

    rows: dict[str, SimpleNamespace] = field(default_factory=dict)
    clock: int = 1_700_000_000
    seconds_per_change: int = 1
    is_active: bool = True
    valves: dict[str, Any] = field(default_factory=dict)
    lists: int = 0  # how often all rows were read

    async def get_all_feedback_ids(self) -> list[SimpleNamespace]:
        self.lists += 1
        return list(self.rows.values())

    async def get_feedback_by_id(self, id: str) -> SimpleNamespace | None:
        return self.rows.get(id)

    async def get_function_by_id(self, id: str) -> SimpleNamespace:
        return SimpleNamespace(is_active=self.is_active)

    async def get_function_valves_by_id(self, id: str) -> dict[str, Any]:
        return self.valves

    def vote(
        self, id: str, message_id: str, rating: int | None, *others: str, user: str = USER, **data: Any
    ) -> dict[str, Any]:
        """Create or change a row as the page does, and return the event."""
        self.clock += self.seconds_per_change
        kind = "updated" if id in self.rows else "created"
        replies = sorted((message_id, *others))
        prompt = f"prompt-{replies[0]}"
        messages: dict[str, Any] = {name: {"id": name, "parentId": prompt, "childrenIds": []} for name in replies}
        messages[prompt] = {"id": prompt, "parentId": None, "childrenIds": replies}
        self.rows[id] = SimpleNamespace(
            id=id,
            user_id=user,
            updated_at=self.clock,
            data={"rating": rating, "model_id": "shop", **data},
            meta={"message_id": message_id, "chat_id": "chat-1"},
            snapshot={"chat": {"id": "chat-1", "chat": {"history": {"messages": messages}}}},
        )
        return event(kind, id)

    def delete(self, id: str) -> dict[str, Any]:
        self.rows.pop(id, None)
        return event("deleted", id)


def event(kind: str, id: str) -> dict[str, Any]:
    return {"event": f"feedback.{kind}", "subject": {"type": "feedback", "id": id}}


@contextmanager
def load_plugin(open_webui: OpenWebUI, data_folder: Path) -> Iterator[Any]:
    """Yield the module of the function. It finds `open_webui` in place of Open WebUI's modules until the end."""
    modules: dict[str, dict[str, Any]] = {
        "open_webui": {},
        "open_webui.env": {"DATA_DIR": data_folder},
        "open_webui.models": {},
        "open_webui.models.feedbacks": {"Feedbacks": open_webui},
        "open_webui.models.functions": {"Functions": open_webui},
    }
    for name, values in modules.items():
        sys.modules[name] = ModuleType(name)
        vars(sys.modules[name]).update(values)
    try:
        spec = importlib.util.spec_from_file_location("attune_openwebui", PLUGIN)
        assert spec is not None and spec.loader is not None
        loaded = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(loaded)
        yield loaded
    finally:
        for name in modules:
            del sys.modules[name]
