"""Tables and figures of finished runs, next to the paper's numbers."""
