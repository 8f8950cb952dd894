"""The privacy mathematics: arrays in, arrays and numbers out. No models, no cluster, no input or output.

Importing the package registers the events of every protocol, so that a stored event can be read back by its kind.
"""

from services.privacy import pmixed as pmixed
