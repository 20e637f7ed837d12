"""LangGraph: a graph with a chat model, a tool and a checkpointer, with ChatOpenAI and `include_response_headers`."""

from typing import Any
from uuid import uuid4

from client_program import (
    API_KEY,
    BASE_URL,
    MAX_TOKENS,
    MESSAGES,
    MODEL,
    NEXT_QUESTION,
    ORDER_MESSAGES,
    TEMPERATURE,
    Opening,
    order_status,
    report,
)
from langchain_core.messages import AIMessageChunk, BaseMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.checkpoint.memory import MemorySaver
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode

SAMPLING: Any = {"model": MODEL, "temperature": TEMPERATURE, "max_completion_tokens": MAX_TOKENS}
model = ChatOpenAI(base_url=BASE_URL, api_key=API_KEY, include_response_headers=True, **SAMPLING)
status_tool = tool(order_status)


def completion_id(reply: BaseMessage) -> Any:
    return reply.response_metadata["headers"]["x-completion-id"]


def build_graph(runnable: Any, *, with_tool: bool = False) -> Any:
    graph = StateGraph(MessagesState)
    graph.add_node("model", lambda state: {"messages": [runnable.invoke(state["messages"])]})
    graph.add_edge(START, "model")
    if with_tool:
        graph.add_node("tools", ToolNode([status_tool]))
        graph.add_edge("model", "tools")
        graph.add_edge("tools", END)
    return graph.compile(checkpointer=MemorySaver())


def new_thread() -> Any:
    return {"configurable": {"thread_id": uuid4().hex}}


def chat() -> dict[str, Any]:
    reply = build_graph(model).invoke({"messages": MESSAGES}, new_thread())["messages"][-1]
    return {"id": completion_id(reply), "text": reply.text}


def stream() -> dict[str, Any]:
    graph, thread = build_graph(model), new_thread()
    parts = graph.stream({"messages": MESSAGES}, thread, stream_mode="messages")
    texts = [chunk.text for chunk, _ in parts if isinstance(chunk, AIMessageChunk) and chunk.text]
    reply = graph.get_state(thread).values["messages"][-1]
    return {"id": completion_id(reply), "text": "".join(texts), "pieces": len(texts)}


def tools() -> dict[str, Any]:
    bound = model.bind_tools([status_tool], tool_choice="order_status")
    *_, reply, result = build_graph(bound, with_tool=True).invoke({"messages": ORDER_MESSAGES}, new_thread())[
        "messages"
    ]
    [call] = reply.tool_calls
    assert "shipped" in result.text
    return {"id": completion_id(reply), "tool": {"name": call["name"], "arguments": call["args"]}}


def structured() -> dict[str, Any]:
    reply = model.with_structured_output(Opening, include_raw=True).invoke(MESSAGES)
    return {"id": completion_id(reply["raw"]), "value": reply["parsed"].model_dump()}


def multi_turn() -> dict[str, Any]:
    graph, thread = build_graph(model), new_thread()
    first = graph.invoke({"messages": MESSAGES}, thread)["messages"][-1].text
    reply = graph.invoke({"messages": [{"role": "user", "content": NEXT_QUESTION}]}, thread)["messages"][-1]
    return {"id": completion_id(reply), "text": reply.text, "first_text": first}


report(chat=chat, stream=stream, tools=tools, structured=structured, multi_turn=multi_turn)
