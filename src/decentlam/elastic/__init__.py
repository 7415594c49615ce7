"""Members of a run that come and go: a layer above the runtime, which does not know of it."""
