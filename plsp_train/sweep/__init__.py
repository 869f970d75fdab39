"""Many runs from one command: a grid of settings, side by side, that continues where it was stopped."""
