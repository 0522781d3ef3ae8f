"""The version of Plumbline: pyproject.toml reads it here, and so does every answer."""

VERSION = "0.1.0"
