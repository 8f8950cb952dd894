"""Implements the privacy mathematics on arrays, without models, a cluster, or input and output.

`events`, `protocol` and `settings` define what a protocol is; `protocols` has one file for each. Importing the package
registers every kind of event, so that stored events can be read.
"""

from privmix.privacy import protocols as protocols
from privmix.privacy.sampling import selection as selection
