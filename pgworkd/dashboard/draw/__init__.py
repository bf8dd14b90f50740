"""Drawings of the pages: pure functions, which make shapes of data; templates write them as SVG.

charts   bars and lines over time, sparklines         graph     jobs that wait for each other, in layers
attempts what a job has lived through, to scale       states    the states of a job, and where it is
"""
