"""The commands that work on installed models, one file each."""
