"""Owns the HTTP of the service: OpenAI's routes, and the console.

Start at `app.py`, which builds the application, and at `generation.py` for one completion. `deployment.py` runs it on
Ray Serve. What a request means (its schema, limits, key and answer) is in `privmix.requests`.
"""
