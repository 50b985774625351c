"""Serves an exported model over HTTP: for trying, and for small loads."""
