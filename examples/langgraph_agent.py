"""An example agent: a LangGraph loop over a running Attune service, with two tools and feedback on every turn.

    export ATTUNE_URL=http://127.0.0.1:8700 ATTUNE_API_KEY=sk-attune-…
    python -m examples.langgraph_agent "Where is my order 4321?" "When are you open on Friday?"

Two lines connect it to training: the model is a ChatAttune, and `feedback` is called for the replies of each turn.
"""

import argparse
import json
import re
from typing import Any

from attune_client.langchain import ChatAttune
from langchain_core.messages import AIMessage, AIMessageChunk, AnyMessage, HumanMessage, SystemMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.graph.state import CompiledStateGraph
from langgraph.prebuilt import ToolNode, tools_condition

from demo.dialogues import ORDER_STATUS, SYSTEM
from demo.shop import HOURS, ORDERS

Agent = CompiledStateGraph[MessagesState, None, MessagesState, MessagesState]
ORDER_ID = re.compile(r"\b\d{4}\b")
QUESTIONS = ("Where is my order 4321?", "When will order 1002 arrive?", "When are you open on Friday?")


def order_state(order_id: str) -> str:
    """Return the state of an order. Every order id has one."""
    return tuple(ORDERS)[sum(map(ord, order_id)) % len(ORDERS)]


@tool
def order_status(order_id: str) -> str:
    """Look up the state of an order."""
    return json.dumps({"state": order_state(order_id)})


@tool
def opening_hours(day: str) -> str:
    """Look up when the shop is open on a day of the week."""
    return json.dumps({"hours": HOURS.get(day.capitalize(), "unknown")})


TOOLS: list[Any] = [ORDER_STATUS, opening_hours]  # of the first, the exact schema that the demo model was trained with


def build_agent(model: ChatOpenAI, *, force: bool = False) -> Agent:
    """Build the graph: model → tool → model, until the model answers. `force` requires a tool call first."""
    model_with_tools = model.bind_tools(TOOLS)
    first_model = model.bind_tools(TOOLS, tool_choice="required") if force else model_with_tools

    def answer(state: MessagesState) -> dict[str, list[AnyMessage]]:
        next_model = first_model if isinstance(state["messages"][-1], HumanMessage) else model_with_tools
        return {"messages": [next_model.invoke([SystemMessage(SYSTEM), *state["messages"]])]}

    graph = StateGraph(MessagesState)
    graph.add_node("answer", answer)
    graph.add_node("tools", ToolNode([order_status, opening_hours]))
    graph.add_edge(START, "answer")
    graph.add_conditional_edges("answer", tools_condition)
    graph.add_edge("tools", "answer")
    return graph.compile(checkpointer=InMemorySaver())


def run_turn(agent: Agent, question: str, thread_id: str) -> list[AIMessage]:
    """Run one turn and print it as it streams. Return the model's messages: tool calls, and the answer."""
    state = MessagesState(messages=[HumanMessage(question)])
    config: Any = {"configurable": {"thread_id": thread_id}, "recursion_limit": 8}
    for chunk, _ in agent.stream(state, config, stream_mode="messages"):
        if isinstance(chunk, AIMessageChunk):
            print(chunk.text, end="", flush=True)
    print()
    messages = agent.get_state(config).values["messages"]
    start = max(index for index, message in enumerate(messages) if isinstance(message, HumanMessage))
    return [message for message in messages[start:] if isinstance(message, AIMessage)]


def is_helpful(question: str, answer: str) -> bool:
    """Return whether the answer states the hours or the delivery time. In your product a person or a test judges."""
    if order := ORDER_ID.search(question):  # also one that names a day
        return ORDERS[order_state(order[0])] in answer
    return any(
        day.lower() in question.lower() and all(hour in answer for hour in hours) for day, hours in HOURS.items()
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m examples.langgraph_agent", description=__doc__)
    parser.add_argument("questions", nargs="*", default=QUESTIONS)
    parser.add_argument("--model", default="assistant")
    parser.add_argument("--force", action="store_true", help="call the tool before answering")
    args = parser.parse_args()
    model = ChatAttune(model=args.model, max_completion_tokens=120)
    agent = build_agent(model, force=args.force)
    for number, question in enumerate(args.questions):
        print(f"> {question}")
        replies = run_turn(agent, question, f"thread-{number}")
        good = is_helpful(question, replies[-1].text)
        for reply in replies:
            model.feedback(reply, good, source={"kind": "CODE", "id": "demo-agent"})
        version = replies[-1].response_metadata["model_name"]
        print(f"  {version}, {len(replies)} rated {'good' if good else 'bad'}\n")


if __name__ == "__main__":
    main()
