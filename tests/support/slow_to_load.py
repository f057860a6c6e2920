"""Computes as it is loaded, for some seconds: as kernels are compiled."""

import time

END_S = time.monotonic() + 3.0
while time.monotonic() < END_S:
    sum(range(1000))
