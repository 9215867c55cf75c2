"""Runs that answer over HTTP in the manner of OpenAI's interface."""
