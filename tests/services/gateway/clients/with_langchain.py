"""Calls the service (python with_langchain.py URL KEY): chat and completion models, complete and streamed."""

import sys
from typing import Any, Literal

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


chat = ChatOpenAI(**{**PARAMETERS, "max_tokens": 100}).with_structured_output(Ticket, method="json_schema")
assert isinstance(chat.invoke(HISTORY), Ticket)
answer = ChatOpenAI(**PARAMETERS).invoke(HISTORY)
assert answer.response_metadata["finish_reason"] in ("stop", "length")
assert answer.usage_metadata["output_tokens"] > 0
assert "".join(chunk.content for chunk in ChatOpenAI(**PARAMETERS, stream_usage=True).stream(HISTORY))
assert OpenAI(**PARAMETERS).invoke("The patient")
