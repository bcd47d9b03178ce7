"""The commands that measure, plan and record, one file each."""
