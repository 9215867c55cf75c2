"""The command line: verbs, and how their results are printed."""
