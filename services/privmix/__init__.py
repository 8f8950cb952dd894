"""Serves next-token queries from models that are fine-tuned on private text, with differential privacy.

Clients of a service need nothing of this package: any OpenAI client asks it. A program that has the rows of its own
models takes the mathematics from `privmix.privacy`, as `cluster/examples/private_token.py` does.
`privmix_cluster` is the command line, which `python -m privmix` runs too.
"""
