"""An example agent: a LangGraph loop over a running Attune, with one tool, and a judgement of every turn.

    ATTUNE_URL=http://127.0.0.1:8700 ATTUNE_API_KEY=sk-attune-… python -m demo.agent "Where is my order 4321?"

Two lines make it learn: the model is a ChatAttune, and after each turn `feedback` says what its replies were worth.
"""

import argparse
import json
from typing import Any

from langchain_core.messages import AIMessage, AIMessageChunk, AnyMessage, HumanMessage, SystemMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.graph.state import CompiledStateGraph
from langgraph.prebuilt import ToolNode, tools_condition

from app.langchain import ChatAttune
from demo.dialogues import ORDER_STATUS, SYSTEM
from demo.shop import ORDERS

Agent = CompiledStateGraph[MessagesState, None, MessagesState, MessagesState]
QUESTIONS = ("Where is my order 4321?", "When will order 1002 arrive?")


def state_of(order_id: str) -> str:
    """The shop's books: every order is somewhere."""
    return tuple(ORDERS)[sum(map(ord, order_id)) % len(ORDERS)]


@tool
def order_status(order_id: str) -> str:
    """Look up the state of an order."""
    return json.dumps({"state": state_of(order_id)})


def build(model: ChatOpenAI, *, force: bool = False) -> Agent:
    """model → tool → model, until the model answers. `force` makes it look something up before it says anything."""
    free = model.bind_tools([ORDER_STATUS])  # this very wording, for a small model knows no other
    first = model.bind_tools([ORDER_STATUS], tool_choice="order_status") if force else free

    def answer(state: MessagesState) -> dict[str, list[AnyMessage]]:
        speaker = first if isinstance(state["messages"][-1], HumanMessage) else free
        return {"messages": [speaker.invoke([SystemMessage(SYSTEM), *state["messages"]])]}

    graph = StateGraph(MessagesState)
    graph.add_node("answer", answer)
    graph.add_node("tools", ToolNode([order_status]))
    graph.add_edge(START, "answer")
    graph.add_conditional_edges("answer", tools_condition)
    graph.add_edge("tools", "answer")
    return graph.compile(checkpointer=InMemorySaver())


def ask(agent: Agent, question: str, thread: str) -> list[AIMessage]:
    """One turn, shown as it comes. Returns the replies of the model in this turn: calls of the tool, and the answer."""
    asked = MessagesState(messages=[HumanMessage(question)])
    config: Any = {"configurable": {"thread_id": thread}, "recursion_limit": 8}
    for piece, _ in agent.stream(asked, config, stream_mode="messages"):
        if isinstance(piece, AIMessageChunk):
            print(piece.text, end="", flush=True)
    print()
    messages = agent.get_state(config).values["messages"]
    begin = max(at for at, message in enumerate(messages) if isinstance(message, HumanMessage))
    return [message for message in messages[begin:] if isinstance(message, AIMessage)]


def helped(question: str, answer: str) -> bool:
    """Does the answer say how long it takes? In your product a person, a test or another model judges."""
    order_id = "".join(letter for letter in question if letter.isdigit())
    return ORDERS[state_of(order_id)] in answer


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m demo.agent", description=__doc__)
    parser.add_argument("questions", nargs="*", default=QUESTIONS)
    parser.add_argument("--model", default="assistant")
    parser.add_argument("--force", action="store_true", help="look the order up before the first word")
    asked = parser.parse_args()
    model = ChatAttune(model=asked.model, max_completion_tokens=120)
    agent = build(model, force=asked.force)
    for number, question in enumerate(asked.questions):
        print(f"> {question}")
        replies = ask(agent, question, f"thread-{number}")
        good = helped(question, replies[-1].text)
        for reply in replies:
            model.feedback(reply, good, source={"kind": "CODE", "id": "demo-agent"})
        version = replies[-1].response_metadata["model_name"]
        print(f"  {version}, {len(replies)} judged {'good' if good else 'bad'}\n")


if __name__ == "__main__":
    main()
