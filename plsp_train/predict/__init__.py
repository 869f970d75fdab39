"""Labels of new inputs from a trained model, and its export."""
