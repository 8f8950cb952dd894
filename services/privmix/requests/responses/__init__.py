"""Implements the bodies of OpenAI's `POST /v1/responses` on top of chats: `schema` what it accepts, `answers` the rest.

A request becomes a chat, so that its prompt, structure, limits and charges are those of `/v1/chat/completions`.
Nothing is stored: a client sends all earlier items again.
"""
