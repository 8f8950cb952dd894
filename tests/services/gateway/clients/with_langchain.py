"""Calls the service with `langchain-openai`: chat and completion models, complete and streamed, and an agent's loop.

Run as `python with_langchain.py URL KEY`; prints one JSON object.
"""

import json
import sys
from typing import Any, Literal

from langchain.agents import create_agent
from langchain.agents.middleware import wrap_model_call
from langchain_core.messages import AIMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel

URL, KEY = sys.argv[1:]
PARAMETERS: Any = {
    "model": "privmix",
    "base_url": URL,
    "api_key": KEY,
    "max_tokens": 8,
    "max_retries": 0,
    "timeout": 300,
}
HISTORY = [("system", "Be brief."), ("human", "When does the clinic open?"), ("ai", "At nine."), ("human", "Thanks.")]


class Ticket(BaseModel):
    """A request of a caller."""

    reason: Literal["a sore throat", "a flu shot"]
    urgent: bool


for method in ("json_schema", "function_calling"):
    chat = ChatOpenAI(**{**PARAMETERS, "max_tokens": 100}).with_structured_output(Ticket, method=method)
    assert isinstance(chat.invoke(HISTORY), Ticket), method


@tool
def book(reason: Literal["a sore throat", "a flu shot"]) -> str:
    """Books a visit."""
    booked.append(reason)
    return f"Booked: {reason}."


@wrap_model_call
def call_first(request: Any, handler: Any) -> Any:
    """Demands a call in the first turn, and leaves the next turns to the model."""
    return handler(request if booked else request.override(tool_choice="any"))


booked: list[str] = []
agent = create_agent(ChatOpenAI(**{**PARAMETERS, "max_tokens": 40}), [book], middleware=[call_first])
messages = agent.invoke({"messages": HISTORY[:2]}, {"recursion_limit": 50})["messages"]
assert booked and isinstance(messages[3], ToolMessage)
assert isinstance(messages[-1], AIMessage) and not messages[-1].tool_calls

response = ChatOpenAI(**PARAMETERS, use_responses_api=True).invoke(HISTORY)
answer = ChatOpenAI(**PARAMETERS).invoke(HISTORY)
streamed = list(ChatOpenAI(**PARAMETERS, stream_usage=True).stream(HISTORY))
completion = OpenAI(**PARAMETERS).invoke("The patient")
print(
    json.dumps(
        {
            "chat": [answer.response_metadata["finish_reason"], answer.usage_metadata["output_tokens"]],
            "stream": ["-", len("".join(chunk.content for chunk in streamed))],
            "completion": ["-", len(completion)],
            "response": ["-", response.usage_metadata["output_tokens"]],
            "agent": ["-", len(messages)],
        }
    )
)
