"""Where the rows of a run go: JSON lines, console lines, a progress bar, Weights & Biases."""
