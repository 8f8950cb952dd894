"""Owns the way from what people write to tokens, for prompts and for the texts of a training alike.

`tokenizer.py` loads a model's tokenizer. `people_text.py` encodes text, in which a special token is text like any
other, and chats, in which only the template's special tokens are special.
"""
