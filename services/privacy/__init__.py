"""The privacy mathematics: arrays in, arrays and numbers out. No models, no cluster, no input or output.

`events`, `protocol` and `settings` say what a protocol is; `protocols` has one file for each. Importing the package
registers every kind of event, so that a stored event can be read back.
"""

from services.privacy import protocols as protocols
from services.privacy.sampling import selection as selection
