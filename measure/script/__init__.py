"""The user's own program on a make-believe GPU: what it holds, by line, part and module. Importing this package imports no torch."""
