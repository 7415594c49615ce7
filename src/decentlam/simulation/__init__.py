"""n nodes in one process: the recursion itself, and a torch module trained on it."""
