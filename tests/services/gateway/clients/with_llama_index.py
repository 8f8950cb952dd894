"""Calls the service (python with_llama_index.py URL KEY): chat and completion, complete and streamed."""

import sys
from typing import Any

from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike

URL, KEY = sys.argv[1:]
PARAMETERS: Any = {"model": "privmix", "api_base": URL, "api_key": KEY, "max_tokens": 8, "temperature": 0.7}
CHAT = [ChatMessage(role="user", content="When does the clinic open?")]

chat_model = OpenAILike(**PARAMETERS, max_retries=0, is_chat_model=True, context_window=512)
answer = chat_model.chat(CHAT).raw
assert answer.choices[0].finish_reason in ("stop", "length") and answer.usage.completion_tokens > 0
*_, last = chat_model.stream_chat(CHAT)
assert last.message.content
completion_model = OpenAILike(**PARAMETERS, max_retries=0, is_chat_model=False, context_window=512)
completion = completion_model.complete("The patient")
assert completion.raw.choices[0].finish_reason in ("stop", "length") and completion.text
*_, end = completion_model.stream_complete("The patient")
assert end.text
