"""Names the types of the arrays that the mathematics computes with."""

import numpy as np
from numpy.typing import NDArray

Reals = NDArray[np.float64]
Integers = NDArray[np.int64]
