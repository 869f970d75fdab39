"""A grid of runs from one command, in parallel and resumable."""
