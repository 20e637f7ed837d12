"""The tool `search`: the documents that fit a query best."""

from alignment.environments.documents import Document, DocumentSource
from alignment.environments.tools.base import EpisodeContext, JsonObject, Tool, ToolResult
from alignment.environments.tools.result_text import cut_text

DESCRIPTION = "Search the documents for words. Returns the documents that fit best."
PARAMETERS: JsonObject = {
    "type": "object",
    "properties": {"query": {"type": "string", "description": "The words to search for."}},
    "required": ["query"],
    "additionalProperties": False,
}
NOTHING = "No document has any of these words."


class SearchTool(Tool[None]):
    """Shows the best `limit` documents, each cut to `document_bytes`, so that a long one does not displace the others.

    A query is words alone: quotes, operators and brackets are ignored, and never an error. The source ends
    slow searches, which are failures of the host.
    """

    has_own_time_limit = True

    def __init__(
        self,
        source: DocumentSource,
        *,
        limit: int = 3,
        document_bytes: int = 2048,
        name: str = "search",
        description: str = DESCRIPTION,
    ) -> None:
        self.name = name
        self.description = description
        self.parameters = PARAMETERS
        self._source = source
        self._limit = limit
        self._document_bytes = document_bytes

    async def create(self, episode: EpisodeContext) -> None:
        return None

    async def execute(self, state: None, arguments: JsonObject) -> ToolResult:
        documents = await self._source.search(str(arguments["query"]), self._limit)
        texts = [self._describe(number, document) for number, document in enumerate(documents, 1)]
        return ToolResult("\n\n".join(texts) or NOTHING, metrics={"num_documents": float(len(documents))})

    def _describe(self, number: int, document: Document) -> str:
        text = cut_text(document.text.strip(), self._document_bytes)
        return f"[{number}] {document.title}\n{text}" if document.title else f"[{number}] {text}"
