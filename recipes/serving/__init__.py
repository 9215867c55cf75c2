"""`workbench serve`: finished runs behind OpenAI's interface."""
