"""What detectors find, how it is scored, and what it is compared with."""
