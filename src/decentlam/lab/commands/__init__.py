"""The commands of `decentlam`, one file each."""
