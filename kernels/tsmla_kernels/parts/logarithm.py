"""Kernels compute powers and logarithms of 2; these lead from natural ones and back."""

import math

LOG2_E = math.log2(math.e)
LN_2 = math.log(2.0)
