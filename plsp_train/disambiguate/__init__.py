"""Labels of the training instances as a file, and the list of those to review."""
