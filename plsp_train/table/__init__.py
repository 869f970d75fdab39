"""Tables and figures of finished runs, beside the numbers of the paper."""
