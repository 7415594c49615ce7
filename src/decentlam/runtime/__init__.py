"""When each thing happens in one real node: from a gradient to the updated parameter."""
