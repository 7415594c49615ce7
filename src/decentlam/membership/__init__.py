"""Who takes part: heartbeats through the store, and agreement on who is left when that changes."""
