"""Factors between natural logarithms and those of base 2, which kernels compute."""

import math

LOG2_E = math.log2(math.e)
LN_2 = math.log(2.0)
