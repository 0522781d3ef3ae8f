"""What each page shows of its answer."""
