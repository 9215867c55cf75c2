"""Runs of sentence embeddings and rerankers, and their verbs."""
