"""How a message gets mixed: one interface, and one file for each way."""
