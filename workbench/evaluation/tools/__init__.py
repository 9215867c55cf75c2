"""Tools and environments of a user's file: their schemas, the processes that run them, and episodes of turns."""
