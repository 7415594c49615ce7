"""Before training: is it stable, how biased is it, what will a step cost."""
