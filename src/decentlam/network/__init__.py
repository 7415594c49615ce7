"""The processes of a run: who they are, how they talk, and who is still alive."""
