"""Example programs; each can be imported, and run against a server."""
