"""Runs that measure: started, watched, kept, shown."""
