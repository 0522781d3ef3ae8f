"""Runs as other tools write them: command lines and config files, read into a plan and written back."""
