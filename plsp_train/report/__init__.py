"""A self-contained HTML page about one or more runs."""
