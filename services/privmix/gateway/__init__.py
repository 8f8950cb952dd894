"""Owns a request from its body to its answer, and the HTTP of the service: OpenAI's routes and the console.

Start at `app.py`, which builds the application, and at `generation.py` for one request: `preparation.py` checks a body
(`schema.py`) and turns it into generations, `admission.py` admits them, `coordinator_client.py` submits them and
continues them when a coordinator dies, and `streaming.py` sends their answer (`answers.py`). `errors.py` has every HTTP
error. `deployment.py` runs the application on Ray Serve, and `front_door.py` HAProxy before it.
"""
