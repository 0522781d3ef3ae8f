"""One page a file; each has `render`, and app.py registers it."""
