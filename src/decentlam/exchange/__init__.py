"""How a message gets mixed: all nodes in one process, or one node per process."""
