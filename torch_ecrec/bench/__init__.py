"""Measurements, as commands: `torch-ecrec bench exactness`.

exactness.py   kills in real runs: is everything that follows bit-identical, and how long does training pause?
"""
